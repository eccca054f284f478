"fastaccum, with its defaults."
from fastaccum import GradientAccumulation
from .fastai import Fastai

class Fastaccum(Fastai):
    key,title,package = 'fastaccum','fastaccum','fastaccum'
    docs = 'https://fastaccum.github.io/fastaccum/accumulation.html'
    how = 'GradientAccumulation(accum_bs)'
    def accumulation(self, micro, accum): return [GradientAccumulation(accum)]

peers = [Fastaccum]
