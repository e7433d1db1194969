"""The CUDA target: compiles, loads and launches the kernels of csrc/ on NVIDIA GPUs."""
