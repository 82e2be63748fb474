"""Import-time stand-ins for packages that SGLang imports but never calls on a machine without a GPU.

This folder is on PYTHONPATH of a CPU server only: transformers takes any importable torchvision for the real package.
The wheels of sgl_kernel are CUDA-only, and those of torchvision fail on a CPU build of torch. Calling a stub raises.
"""
