"""Mochi 1 (10 billion parameters, Apache-2.0), a model family outside the repository's packages.

    python post_train.py --family examples/mochi --transformer_version mochi1 --pretrained_model_root FOLDER

docs/extend.md#add-a-model explains each file.
"""

CLASS_NAMES = ("MochiTransformer3DModel", "AutoencoderKLMochi")
