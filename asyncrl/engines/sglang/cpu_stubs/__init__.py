"""Import-time stand-ins for what SGLang imports and never calls on a machine without a GPU.

This folder is put on PYTHONPATH of a CPU server, and of nothing else: transformers takes any importable torchvision for
a real one. sgl_kernel's wheels are CUDA-only, and torchvision's fail on a CPU build of torch. Calling one raises.
"""
