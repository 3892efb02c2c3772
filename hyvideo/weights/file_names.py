"""Usual names of the files of a LoRA. Imports no torch."""

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
LORA_FILES = (PEFT_FILE, DIFFUSERS_FILE)
