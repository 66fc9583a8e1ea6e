"""All that knows TorchTitan. Importing this package registers our parts with TorchTitan:

[experimental]
custom_import = "titan_fp8zero.titan"
"""

import torchtitan_patches
from titan_fp8zero.titan.specs import register_train_specs
from titan_fp8zero.titan.text import register_datasets

register_datasets()
register_train_specs()
torchtitan_patches.apply(["clip_grad_norm", "checkpoint_manager"])
