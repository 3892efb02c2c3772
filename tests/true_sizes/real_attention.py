"""Run a program with real attention over any number of tokens; only the decoder keeps its stand-in.

hyvideo/evaluation/rehearsal/stand_ins.py tests/true_sizes/real_attention.py generate.py [flags]
"""

import runpy
import sys

from hyvideo.models import attention, attention_kernels

if __name__ == "__main__":
    attention.scaled_dot_product = attention_kernels.scaled_dot_product
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
