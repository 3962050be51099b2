"""The check of a machine with an NVIDIA GPU: the body of `scripts/gpu_check`.

`steps` runs steps within a time, `checklist` says which there are, `main` is the command. The rest
are programs that it starts as child processes, so that a library that crashes takes one step with
it and no more.
"""
