"""`import cuda_ext.ops` defines the ops in `torch.ops.cuda_ext`, for a process that names none of them itself.

`import cuda_ext` alone loads nothing. Whoever loads a program that was exported with our ops in it, or calls them by
``torch.ops.cuda_ext``, imports this module first, which raises ImportError when the compiled library is missing or does
not fit:

    import cuda_ext.ops
    program = torch.export.load("model.pt2")
"""

import cuda_ext._rules  # noqa: F401
