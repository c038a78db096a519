"""Predicted times on GPUs that nobody has run the kernels on: an analytic model, fed from the machine code.

`hardware` has what is published about a GPU, `work` what a call asks of it (counted in the kernels' own
machine code), `model` the equations, `fused` those of one launch, `fit` their free numbers from measurements on
an H200, `forecast` the predicted times with a range, `comparison` a measurement beside them. Nothing here needs
torch or a GPU.
"""
