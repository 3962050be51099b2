"""From a transformers model to an ONNX file that keeps the contract.

`export` traces and optimizes, `weights` streams the tensors in, `check` proves the result.
"""
