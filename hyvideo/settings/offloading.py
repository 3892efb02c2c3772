"""Where generate.py keeps models while they do not compute; the plan of its memory reads it too."""

from typing import Literal

# none   on the GPU
# model  on the CPU: the VAE is on the GPU only to encode and decode, the transformer to sample
# group  also while they compute: blocks of transformer and text encoder are copied to the GPU one
#        after another
Offloading = Literal["none", "model", "group"]
