"""HunyuanVideo-1.5: text-to-video and image-to-video models with 8.3 billion parameters."""

CLASS_NAMES = (
    "HunyuanVideo15Transformer3DModel",
    "HunyuanVideo_1_5_DiffusionTransformer",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLConv3D",
)
