"""Draft kernels: one specification in plain torch (``reference``), a blocked path for CPUs (``blocked``), Triton for GPUs.

Modules whose names end in ``_kernels`` hold Triton code and are imported only when such a kernel is launched.
"""
