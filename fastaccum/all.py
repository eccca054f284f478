"What `from fastaccum.all import *` brings."
from fastaccum.accumulation import GradientAccumulation
from fastaccum.core.macro_batch import MacroBatch, Position, round_up
from fastaccum.core.notices import TwinWarning
from fastaccum.core.plan import Plan
from fastaccum.noise_scale import NoiseScale
from fastaccum.scaled_lr import ScaledLR
from fastaccum.schedule import GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.sizes import Targets, find_size

__all__ = ['GradientAccumulation', 'GradientAccumulationSchedule', 'GradientAccumulationScheduler', 'MacroBatch',
           'NoiseScale', 'Plan', 'Position', 'ScaledLR', 'Targets', 'TwinWarning', 'find_size', 'round_up']
