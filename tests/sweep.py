"""Compare runs on micro-batches with full-batch runs, for random configurations.

`python tests/sweep.py 10000` draws 10,000 configurations, runs each on full batches and on micro-batches, and
prints the largest deviations.
"""
import os, random, sys
# there is a process for each core, and the models are tiny, so one thread for each process is enough
os.environ.setdefault('OMP_NUM_THREADS', '1')
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
import torch
from fastai.vision.all import Adam, GradientClip, OptimWrapper, RAdam, SGD, accuracy
from fastaccum.testing import assert_same_run, toy, both_runs
from common import RecordAt
from counting import FactorOfProgress, MovingAverage, OwnSchedule, PenaltyInEverySecondBatch, RateByIter, cancels

# fastai's and torch's optimizers, and fastai's methods that fit
opts = dict(sgd=partial(SGD, mom=0.9), adam=Adam, radam=RAdam, torch_adamw=partial(OptimWrapper, opt=torch.optim.AdamW))
fit_methods = dict(
    fit      =lambda l,n,lr,**kw: l.fit(n, slice(lr/10, lr), **kw),
    one_cycle=lambda l,n,lr,**kw: l.fit_one_cycle(n, lr, **kw),
    flat_cos =lambda l,n,lr,**kw: l.fit_flat_cos(n, lr, **kw),
    sgdr     =lambda l,n,lr,**kw: l.fit_sgdr(n, 1, lr, **kw),
    # with n=1, the first fit has no epochs
    fine_tune=lambda l,n,lr,**kw: l.fine_tune(n, lr, freeze_epochs=n-1, **kw),
    resumed  =lambda l,n,lr,**kw: l.fit_one_cycle(n+1, lr, start_epoch=1, **kw),
    two_fits =lambda l,n,lr,**kw: (l.fit_one_cycle(1, lr, **kw), l.fit(n, lr/2, **kw)))

def penalty(event='after_loss', order=0):
    "Return a callback that adds a penalty on the predictions to the loss, like `RNNRegularizer`"
    return RecordAt(event, lambda l: setattr(l, 'loss_grad', l.loss_grad+0.1*l.pred.pow(2).mean()), order)

def fit(learn, cbs, how, n_epoch, lr, wd, freeze_first):
    "Fit with `fit_methods[how]`; with `freeze_first`, before that fit for an epoch with a frozen body"
    if freeze_first:
        learn.freeze()
        learn.fit(1, lr, wd=wd, cbs=cbs)
        learn.unfreeze()
    fit_methods[how](learn, n_epoch, lr, wd=wd, cbs=cbs)

def metered(bs, train_metrics=True, **kwargs):
    "Return a toy Learner whose Recorder also computes metrics in training if `train_metrics`"
    learn = toy(bs, **kwargs)
    learn.recorder.train_metrics = train_metrics
    return learn

def draw(seed):
    "Return a random configuration, as arguments of `both_runs`"
    r = random.Random(seed)
    def maybe(p): return r.random()<p
    micro,accum_bs,n = r.randint(1, 9),r.randint(1, 40),r.randint(12, 90)
    drop_last,tokens = maybe(.25),maybe(.3)
    if drop_last: n = max(n, -(-accum_bs//micro)*micro)   # an epoch must have samples for one whole step
    opt,clip,penalized = r.choice(list(opts)),r.choice([None,None,0.01,0.1]),maybe(.3) and not tokens
    train_metrics = maybe(.5)
    counting = [OwnSchedule,MovingAverage,FactorOfProgress,RateByIter]
    if not tokens: counting.append(PenaltyInEverySecondBatch)
    # fastai computes metrics of a cancelled batch from old predictions, so a run with training metrics cancels none
    if not train_metrics: counting += [partial(cancels, o, r.randint(1, 6)) for o in ('before_batch','after_loss')]
    other = r.choice(counting) if maybe(.4) else None
    def cbs():
        res = [] if clip is None else [GradientClip(clip)]
        if penalized: res.append(penalty())
        return res if other is None else [*res, other()]
    return dict(micro=micro, accum_bs=accum_bs, n=n, seed=seed, tokens=tokens, shuffle=maybe(.5),
        loader_drop_last=maybe(.3), acc=dict(drop_last=drop_last), opt_func=opts[opt], cbs=cbs, make=metered,
        train_metrics=train_metrics, metrics=accuracy if maybe(.5) and not tokens else None, fit=partial(fit,
        how=r.choice(list(fit_methods)), n_epoch=r.randint(1, 3), wd=r.choice([None,0.,0.1]),
        lr=r.choice([1e-2,5e-2] if opt=='sgd' else [1e-3,1e-2]), freeze_first=maybe(.2)))

def check(seed):
    """Run configuration `seed` on full batches and on micro-batches

    Return the deviations between the two runs.
    """
    cfg = draw(seed)
    try: return assert_same_run(*both_runs(**cfg))
    except Exception as e: raise AssertionError(f"seed {seed}, {cfg}: {e}") from e

def main(n, workers=os.cpu_count()):
    "Check `n` configurations in `workers` processes, and print the largest deviations"
    with ProcessPoolExecutor(workers, get_context('spawn'), torch.set_num_threads, (1,)) as pool:
        res = list(pool.map(check, range(n), chunksize=20))
    print(f'\n{len(res)} random runs, largest deviations:')
    for k in res[0]: print(f'  {k:10} {max(o[k] for o in res):.1e}')

if __name__=='__main__': main(int(sys.argv[1]) if len(sys.argv)>1 else 1000)
