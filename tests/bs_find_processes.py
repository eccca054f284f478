"""`bs_find` on several processes, some of which have less memory than others: launched by test_bs_find.py as
processes.py is by test_processes.py"""
import sys
import torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.optimizer import Adam
from fastaccum import GradientAccumulation
from fastaccum.testing import deviation, toy, toy_data
import processes
from processes import distributed_on_cpu, rank, same_everywhere, world
from common import InBackward, short_of, weights
from copy import deepcopy

class Cap(nn.Module):
    "Has memory for `cap` samples, in the forward or in the backward pass; has a buffer, which DDP broadcasts"
    def __init__(self, cap, stage):
        super().__init__()
        self.cap,self.stage = cap,stage
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        self.n += len(x)
        if self.training and self.stage=='forward' and len(x)>self.cap: raise torch.OutOfMemoryError('planted')
        return InBackward.apply(x, short_of(self.cap if self.stage=='backward' else len(x)))

def made(caps, stage='backward', wrap=True, n=70, **kwargs):
    torch.manual_seed(0)
    learn = toy(4, data=toy_data(n), splitter=lambda m: [list(m.parameters())], opt_func=Adam,
        model=lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), Cap(caps[rank], stage),
            nn.Linear(6, 3)).double(), **kwargs)
    if wrap: learn.model = DDP(learn.model)
    return learn
def state(learn):
    return deepcopy((learn.model.state_dict(),learn.opt and learn.opt.state_dict(),torch.get_rng_state(),
        [p.grad for p in learn.model.parameters()]))
def less(r, few=9, many=50): return [few if i==r else many for i in range(world)]

def case_the_smallest_of_all():
    for r in range(world):
        for stage,fitted in (('forward',False),('backward',True)):
            learn = made(less(r), stage)
            if fitted:
                learn.dls.train = learn.dls.train.new(shuffle=False)
                learn.fit(1, 0.01)
            before,ddp = state(learn),learn.model
            res = learn.bs_find('binsearch', show_plot=False)
            assert int(res)==9 and res.processes==world
            assert f'9 samples fit on each of {world} processes, 10 do not' in repr(res), res
            assert (f'process {r}' if rank!=r else 'planted') in [o.error for o in res.trials
                if not o.ok][0]
            assert learn.model is ddp and (learn.opt is None)==(not fitted)
            after = state(learn)
            assert deviation([before[0],before[1] or 0,before[3]], [after[0],after[1] or 0,after[3]])==0
            assert torch.equal(before[2], after[2])
def case_then_it_trains():
    "The model exchanges gradients as ever, and sizes are applied on all"
    learn = made(less(world-1))
    assert int(learn.bs_find(show_plot=False, apply=True))==8 and learn.dls.train.bs==8
    learn.fit(1, 0.01, cbs=GradientAccumulation(32*world, micro_batch_size='auto'))
    same_everywhere(weights(learn))
def case_loaders_of_their_own():
    "The one with the fewest samples says how many there are"
    learn = made([50]*world, n=40 if rank else 30)
    res = learn.bs_find(show_plot=False)
    assert int(res)==30 and 'there are no more' in repr(res), res
def case_in_distrib_ctx():
    distributed_on_cpu()
    learn = made(less(0), wrap=False)
    with learn.distrib_ctx(sync_bn=False, cpu=True): res = learn.bs_find('binsearch', show_plot=False)
    assert int(res)==9 and not isinstance(learn.model, DDP)
def case_nothing_fits():
    learn = made(less(0, 0))
    try: learn.bs_find(show_plot=False)
    except torch.OutOfMemoryError as e: assert 'no batch fits: 2, 1 samples were tried' in str(e), e
    else: raise AssertionError('nothing was said')
def says(text, f):
    try: f()
    except (ValueError,RuntimeError) as e: assert text in str(e), e
    else: raise AssertionError(f'{text!r} was not said')
def case_refused():
    learn = made([50]*world)
    says('`init_val` is ', lambda: learn.bs_find(init_val=2+rank, show_plot=False))
    learn.model.module = nn.SyncBatchNorm.convert_sync_batchnorm(learn.model.module)
    says('SyncBatchNorm', lambda: learn.bs_find(show_plot=False))
    learn = made([50]*world)
    learn.model.module[0] = DDP(learn.model.module[0])
    says('inside of the model', lambda: learn.bs_find(show_plot=False))
def case_another_error_on_one():
    "All hear of it"
    learn = made([50]*world)
    before = weights(learn)
    if rank==world-1: learn.model.module[0].register_forward_hook(lambda *_: 1/0)
    try: learn.bs_find(show_plot=False)
    except ZeroDivisionError: assert rank==world-1
    except RuntimeError as e: assert rank<world-1 and f'failed on process {world-1}' in str(e), e
    else: raise AssertionError('nothing was said')
    assert torch.equal(before, weights(learn)) and isinstance(learn.model, DDP)

if __name__=='__main__':
    mine = {k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__}
    processes.main(*sys.argv[1:], cases=processes.cases_of(mine))
