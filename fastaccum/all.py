"What `from fastaccum.all import *` brings."
from fastaccum.accumulation import GradientAccumulation
from fastaccum.macro_batch import MacroBatch, Plan, Position, round_up
from fastaccum.sizes import Targets, find_size

__all__ = ['GradientAccumulation', 'MacroBatch', 'Plan', 'Position', 'Targets', 'find_size', 'round_up']
