"""What only a GPU can show.

``python -m tests.gpu`` (``make gpu-check``) runs in stages and writes a JSON file after each check; see
docs/gpu.md. The tests beside it are skipped where there is no GPU.
"""
