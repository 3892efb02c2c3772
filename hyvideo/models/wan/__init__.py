"""Wan2.1 text-to-video with 1.3 and 14 billion parameters, image-to-video and first and last frame
with 14 billion, Wan2.2 TI2V with 5 billion and A14B, and AnyFlow, the few-step students of Wan2.1.
"""

CLASS_NAMES = (
    "WanTransformer3DModel",
    "AnyFlowTransformer3DModel",
    "WanModel",
    "AutoencoderKLWan",
)
