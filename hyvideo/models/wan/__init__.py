"""Text-to-video models Wan2.1 with 1.3 and 14 billion parameters and Wan2.2 TI2V with 5 billion,
and AnyFlow, the few-step students of Wan2.1.
"""

CLASS_NAMES = (
    "WanTransformer3DModel",
    "AnyFlowTransformer3DModel",
    "WanModel",
    "AutoencoderKLWan",
)
