"""What happens to 250 samples in micro-batches of 16 and steps of 64, over two epochs. README.md shows three rows.

`python benchmarks/remainders.py` prints it as Markdown.
"""
import warnings
warnings.filterwarnings('ignore')

from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastaccum import GradientAccumulation
from fastaccum.testing import deviation, toy

n,micro,accum_bs,n_epoch = 250,16,64,2

class Steps(Callback):
    "The samples whose gradient each step is made of; what is left unused; the number of steps in each epoch"
    order,run_valid = 5,False   # before those who accumulate
    def before_fit(self): self.pending,self.steps,self.epochs = 0,[],[]
    def before_epoch(self): self.epochs.append(0)
    def after_backward(self): self.pending += len(self.x)
    def after_step(self):
        self.steps.append(self.pending)
        self.epochs[-1] += 1
        self.pending = 0

def run(bs, acc, fit):
    learn = toy(bs, n=n, cbs=Steps())
    fit(learn, acc)
    return learn

def constant(learn, acc): learn.fit(n_epoch, 0.1, cbs=acc)
def one_cycle(learn, acc): learn.fit_one_cycle(n_epoch, 0.1, cbs=acc)

def far(a, b): return f'{deviation(a.model.state_dict(), b.model.state_dict()):.0e}'.replace('0e+00', '0')

def column(bs, acc):
    "A column of the table: what a run did, and how far it is from the run on big batches"
    big,learn = run(accum_bs, [], constant),run(bs, acc(), constant)
    cyc,cyc_learn = run(accum_bs, [], one_cycle),run(bs, acc(), one_cycle)
    s = learn.steps
    return {'optimizer steps in each epoch':' and '.join(map(str, s.epochs)),
        'samples in each step':', '.join(map(str, s.steps)), 'samples left unused':str(s.pending),
        'recorded losses':str(len(learn.recorder.losses)),
        'largest difference of a weight (`fit`)':far(big, learn),
        'largest difference of a weight (`fit_one_cycle`)':far(cyc, cyc_learn)}

def main():
    cols = {f'batches of {accum_bs}':column(accum_bs, lambda: []),
            "fastai's callback":column(micro, lambda: FastaiGradientAccumulation(accum_bs)),
            'fastaccum':column(micro, lambda: GradientAccumulation(accum_bs))}
    print('| | '+' | '.join(cols)+' |\n|---|'+'---|'*len(cols))
    for row in cols['fastaccum']: print(f'| {row} | '+' | '.join(c[row] for c in cols.values())+' |')

if __name__=='__main__': main()
