"""Wan2.1 text-to-video models with 1.3 and 14 billion parameters, and Wan2.2's with 5 billion."""

CLASS_NAMES = ("WanTransformer3DModel", "WanModel", "AutoencoderKLWan")
