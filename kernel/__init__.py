"""The decode megakernel in CuTe-DSL, a module a concern, and its compile step. See decode.py."""
