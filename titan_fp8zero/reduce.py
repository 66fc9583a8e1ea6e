"""Reducing: gradients of a backward pass into buckets, and one reduce-scatter a bucket and step."""

import functools
import weakref
from collections.abc import Callable

import torch
from torch.autograd import Variable

from titan_fp8zero.bucket import Bucket, ReducedGradient
from titan_fp8zero.main_parameter import MainParameter, Weight


class GradientReducer:
    """Folds the gradients of a model's weights into buckets, and reduces these.

    In the last of `backwards_per_step` backward passes, a bucket's reduce-scatter starts when its
    last gradient has arrived, and overlaps with the rest of backward; at the end of backward every
    main parameter has its `.grad`. Calls `on_backward` when a backward pass begins, and
    `on_reduced` with the weights that any rank used when gradients are there.
    """

    def __init__(
        self,
        mains_of: dict[Bucket, list[MainParameter]],
        *,
        backwards_per_step: int,
        on_backward: Callable[[], None],
        on_reduced: Callable[[set[Weight]], None],
    ) -> None:
        self.requires_gradient_sync = True
        self._mains_of = mains_of
        self._backwards_per_step = backwards_per_step
        self._on_backward = on_backward
        self._on_reduced = on_reduced
        # Backward meets the last modules first: their buckets are complete, and reduced, first.
        self._order = [
            bucket
            for bucket, mains in reversed(mains_of.items())
            if mains[0].parameter.requires_grad
        ]
        self._weights = [w for mains in mains_of.values() for main in mains for w in main.weights]
        for index, weight in enumerate(self._weights):
            if weight.trainable:
                on_gradient = functools.partial(_pass_on, weakref.ref(self), index)
                weight.leaf.register_post_accumulate_grad_hook(on_gradient)
        self._reset()

    def drop_gradients(self) -> None:
        """Forget gradients that were accumulated but not reduced, after a failed backward, say."""
        for weight in self._weights:
            weight.leaf.grad = None
        for bucket in self._mains_of:
            bucket.drop_gradient()
        self._reset()

    def _reset(self) -> None:
        self._backwards_seen = 0
        self._unreduced_backwards = 0
        self._graph_task: int | None = None
        self._used_locally: set[Weight] = set()

    @torch.no_grad()
    def on_gradient(self, weight_index: int, leaf: torch.Tensor) -> None:
        """Take the gradient that has arrived at a weight's leaf."""
        weight = self._weights[weight_index]
        assert leaf.grad is not None
        gradient = weight.mesh.local_gradient(leaf.grad)
        leaf.grad = None
        if gradient.layout != torch.strided:
            raise RuntimeError(f"{weight.fqn} has a sparse gradient: only dense ones are reduced")
        self._enter_backward()
        weight.main.bucket.accumulate(weight.main.layout, weight.member, gradient)
        self._used_locally.add(weight)
        if self._reduces_now:
            self._awaited[weight.main.bucket].discard(weight)
            self._start_ready()

    def _enter_backward(self) -> None:
        graph_task = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        if self._graph_task is not None:
            raise RuntimeError(
                "the backward before this one failed and left gradients behind: call "
                "optimizer.zero_grad() before the next backward. (If none failed: reentrant "
                "activation checkpointing does not work, use use_reentrant=False.)"
            )
        self._on_backward()
        self._graph_task = graph_task
        self._reduces_now = (
            self.requires_gradient_sync and self._backwards_seen == self._backwards_per_step - 1
        )
        self._awaited = {
            bucket: {weight for main in self._mains_of[bucket] for weight in main.weights}
            for bucket in self._order
        }
        self._to_reduce = list(reversed(self._order))
        Variable._execution_engine.queue_callback(self._leave_backward)

    def _start_ready(self) -> None:
        # One fixed order on all ranks, whatever order buckets complete in: collectives that are
        # started in different orders deadlock.
        while self._to_reduce and not self._awaited[self._to_reduce[-1]]:
            self._to_reduce.pop().start_reduce()

    @torch.no_grad()
    def _leave_backward(self) -> None:
        self._graph_task = None
        if self.requires_gradient_sync:
            self._backwards_seen += 1
        if not self._reduces_now:
            self._unreduced_backwards += 1
            return
        while self._to_reduce:  # buckets with a weight that this rank did not use
            self._to_reduce.pop().start_reduce()
        for bucket in self._order:
            bucket.wait_reduce()
        used: set[Weight] = set()
        for bucket in self._order:
            used |= self._assign_gradients(bucket, bucket.finish_reduce())
        self._reset()
        self._on_reduced(used)

    def _assign_gradients(self, bucket: Bucket, reduced: ReducedGradient) -> set[Weight]:
        """Give main parameters their gradients; returns the weights that any rank used."""
        used_in_bucket: set[Weight] = set()
        units = reduced.units.to(bucket.main.dtype)
        for main in self._mains_of[bucket]:
            used = {weight for weight in main.weights if self._is_used(weight, reduced)}
            if not used:
                continue
            used_in_bucket |= used
            gradient = main.weights[0].mesh.main_tensor(main.local(units))
            if main.parameter.grad is None:
                main.parameter.grad = gradient
            else:
                main.parameter.grad += gradient
        return used_in_bucket

    def _is_used(self, weight: Weight, reduced: ReducedGradient) -> bool:
        # What this rank used need not be asked: that spares the wait for the device.
        return weight in self._used_locally or reduced.is_used_by_any_rank(weight.member)

    def check_complete(self) -> None:
        """Raises RuntimeError, before an optimizer step, if gradients were not all reduced."""
        if self._graph_task is not None:
            raise RuntimeError(
                "optimizer.step() after a backward that failed: call optimizer.zero_grad() first"
            )
        if not self._unreduced_backwards:
            return
        if not self._backwards_seen:
            raise RuntimeError(
                f"optimizer.step() after {self._unreduced_backwards} backward passes under "
                "set_requires_gradient_sync(False), which were accumulated but not reduced. "
                "Switch it on before the last backward of a step."
            )
        raise RuntimeError(
            f"optimizer.step() after {self._backwards_seen} of {self._backwards_per_step} "
            "backward passes: finish the step's micro-batches, or call optimizer.zero_grad() to "
            "drop them"
        )


def _pass_on(reducer: weakref.ref[GradientReducer], weight_index: int, leaf: torch.Tensor) -> None:
    # Hooks live in the tensor, where no garbage collection finds a cycle: they must own nothing.
    found = reducer()
    if found is None:
        raise RuntimeError(
            "backward of a model that was deleted: its gradients have no place to go"
        )
    found.on_gradient(weight_index, leaf)
