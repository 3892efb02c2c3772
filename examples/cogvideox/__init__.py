"""CogVideoX-2B (1.7 billion parameters, Apache-2.0), a diffusion model with v-prediction, as a model
family outside the repository's packages.

    python post_train.py --family examples/cogvideox --transformer_version cogvideox_2b \
        --pretrained_model_root FOLDER

docs/add_a_model.md explains each file.
"""

CLASS_NAMES = ("CogVideoXTransformer3DModel", "AutoencoderKLCogVideoX")
