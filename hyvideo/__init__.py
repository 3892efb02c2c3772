import logging

# diffusers and peft import torchao wherever it is installed, and it logs warnings that do not
# concern this project.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao"):
    logging.getLogger(_name).setLevel(logging.ERROR)
