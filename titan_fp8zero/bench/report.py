"""What a benchmark measured: a table on the terminal, JSON, and a roofline plot."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from titan_fp8zero.bench.measure import Machine
from titan_fp8zero.console import stdout_console

MARKERS = "os^vDPX"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str
    ms: float
    gbytes: float = 0.0
    """Read and written, at least."""
    gflop: float = 0.0
    peer: str = ""
    """The row whose time this one's is divided by."""

    @property
    def gb_per_s(self) -> float:
        return self.gbytes / self.ms * 1e3

    @property
    def tflop_per_s(self) -> float:
        return self.gflop / self.ms


@dataclass(frozen=True)
class Report:
    """The rows of a benchmark, on one machine."""

    title: str
    machine: Machine
    rows: list[Row]

    def ratio(self, row: Row) -> float | None:
        """Time of a row, divided by that of its peer."""
        times = {other.name: other.ms for other in self.rows}
        return row.ms / times[row.peer] if row.peer else None

    def print(self) -> None:
        """The machine first, then a table."""
        console = stdout_console()
        console.print(str(self.machine))
        table = Table(title=self.title)
        table.add_column("", no_wrap=True)
        for header in ("ms", "GB/s", "of copy", "TFLOP/s", "of GEMM", "time / peer"):
            table.add_column(header, justify="right")
        table.add_column("peer", no_wrap=True)
        for row in self.rows:
            table.add_row(row.name, f"{row.ms:,.3f}", *self._rates(row), row.peer)
        console.print(table)

    def _rates(self, row: Row) -> tuple[str, ...]:
        ratio = self.ratio(row)
        return (
            f"{row.gb_per_s:,.0f}" if row.gbytes else "",
            f"{row.gb_per_s / self.machine.copy_gb_per_s:.3f}" if row.gbytes else "",
            f"{row.tflop_per_s:,.1f}" if row.gflop else "",
            f"{row.tflop_per_s / self.machine.gemm_tflop_per_s:.3f}" if row.gflop else "",
            "" if ratio is None else f"{ratio:.3f}",
        )

    def write(self, out: Path, name: str) -> None:
        """`NAME.json` and `NAME.png` into a folder."""
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        self._plot(out / f"{name}.png")

    def _plot(self, image: Path) -> None:
        """Each row as a point under the machine's roof; without FLOPs, as one FLOP a byte moved."""
        from matplotlib.figure import Figure  # not pyplot: it needs no display

        rows = [row for row in self.rows if row.gbytes]
        figure = Figure(figsize=(12, max(6.0, 0.2 * len(rows))), layout="constrained")
        axes = figure.subplots()
        bandwidth, peak = self.machine.copy_gb_per_s / 1e3, self.machine.gemm_tflop_per_s
        intensities = [0.1 * 1.3**i for i in range(50)]
        roof = [min(peak, bandwidth * intensity) for intensity in intensities]
        axes.loglog(intensities, roof, color="black", label="copy bandwidth, GEMM rate")
        for i, row in enumerate(rows):
            gflop = row.gflop or row.gbytes
            # Ten colors, then the same in another shape.
            marker = MARKERS[i // 10 % len(MARKERS)]
            axes.plot(gflop / row.gbytes, gflop / row.ms, marker, label=row.name)
        axes.set_xlabel("FLOP a byte")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(self.title, fontsize=9)
        axes.grid(alpha=0.3, which="both")
        figure.legend(fontsize=7, loc="outside right upper")
        figure.savefig(image, dpi=120)
