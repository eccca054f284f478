"""Steps and unused samples of 250 samples in micro-batches of 16 and steps of 64, over two epochs.

`python benchmarks/remainders.py` prints a table in Markdown. README.md quotes its losses and steps.
"""
import warnings
warnings.filterwarnings('ignore')
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastaccum import GradientAccumulation
from fastaccum.testing import deviation, toy

n,micro,accum_bs,n_epoch = 250,16,64,2

class Steps(Callback):
    "Counts the samples whose gradients each step uses, the unused samples at the end, and the steps of each epoch"
    order,run_valid = 5,False   # before the callbacks that accumulate
    def before_fit(self): self.pending,self.steps,self.epochs = 0,[],[]
    def before_epoch(self): self.epochs.append(0)
    def after_backward(self): self.pending += len(self.x)
    def after_step(self):
        self.steps.append(self.pending)
        self.epochs[-1] += 1
        self.pending = 0

def run(bs, method, *cbs):
    learn = toy(bs, n=n, cbs=Steps())
    getattr(learn, method)(n_epoch, 0.1, cbs=cbs)
    return learn

def column(bs, acc):
    "Return a column of the table: figures of a run, and the difference of its weights to the full-batch run"
    def off(method):
        full,learn = run(accum_bs, method),run(bs, method, *acc())
        return f'{deviation(full.model.state_dict(), learn.model.state_dict()):.0e}'.replace('0e+00', '0')
    learn = run(bs, 'fit', *acc())
    s = learn.steps
    return {'optimizer steps in each epoch':' and '.join(map(str, s.epochs)),
        'samples in each step':', '.join(map(str, s.steps)), 'samples left unused':str(s.pending),
        'recorded losses':str(len(learn.recorder.losses)),
        'largest difference in any weight (`fit`)':off('fit'),
        'largest difference in any weight (`fit_one_cycle`)':off('fit_one_cycle')}

def main():
    cols = {f'batches of {accum_bs}':column(accum_bs, list),
        "fastai's callback":column(micro, lambda: [FastaiGradientAccumulation(accum_bs)]),
        'fastaccum':column(micro, lambda: [GradientAccumulation(accum_bs)])}
    print('| | '+' | '.join(cols)+' |\n|---|'+'---|'*len(cols))
    for row in cols['fastaccum']: print(f'| {row} | '+' | '.join(c[row] for c in cols.values())+' |')

if __name__=='__main__': main()
