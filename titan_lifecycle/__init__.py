"""An owner for the FSDP2 lifecycle around torchtitan's chunked losses and pipelines."""

__version__ = "0.1.0"
