"""`import cuda_ext.ops` defines the ops in `torch.ops.cuda_ext`.

`import cuda_ext` alone loads nothing. Import this module before you load an exported program that contains these ops,
or call them through ``torch.ops.cuda_ext``. It raises ImportError if the compiled library is missing or does not match:

    import cuda_ext.ops
    program = torch.export.load("model.pt2")
"""

import cuda_ext._rules  # noqa: F401
