"What `from fastaccum.all import *` brings."
from fastaccum.accumulation import GradientAccumulation
from fastaccum.macro_batch import MacroBatch, plan, round_up
from fastaccum.sizes import Targets, find_size

__all__ = ['GradientAccumulation', 'MacroBatch', 'Targets', 'find_size', 'plan', 'round_up']
