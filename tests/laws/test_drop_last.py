"An epoch's incomplete last batch goes where `drop_last` says; by default, where the training loader's own last batch goes."
import pytest, random, torch, warnings
from contextlib import contextmanager
from functools import partial
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, SequentialSampler
from fastai.callback.core import Callback
from fastai.callback.training import ShortEpochCallback
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import IndexSplitter
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.testing import assert_twins, deviation, toy, toy_data, twins
from common import Seen, some

valid = toy_data(9, seed=1)
fixed = dict(shuffle=False, num_workers=0)   # shuffled, loaders of two batch sizes draw other orders

def data_block(ds, bs):
    "As users make them"
    n,every = len(ds),[*ds,*valid]
    def x(i): return every[i][0]
    def y(i): return every[i][1]
    return DataBlock(get_x=x, get_y=y, splitter=IndexSplitter(range(n, n+9))).dataloaders(range(n+9), bs=bs, drop_last=True,
        **fixed)

def keeps(ds, bs):
    dls = from_dsets(ds, bs)
    dls.train.drop_last = False
    return dls

def from_dsets(ds, bs): return DataLoaders.from_dsets(ds, valid, bs=bs, **fixed)
def in_torch(ds, bs): return DataLoaders(TorchLoader(ds, bs, drop_last=True), TorchLoader(valid, bs))
def sampler(ds, bs):
    batches = BatchSampler(SequentialSampler(ds), bs, drop_last=True)
    return DataLoaders(TorchLoader(ds, batch_sampler=batches), TorchLoader(valid, bs))

loaders = dict(from_dsets=from_dsets, data_block=data_block, torch=in_torch, batch_sampler=sampler, keeps=keeps)
makes = dict(plain=GradientAccumulation, schedule=lambda n,**kw: GradientAccumulationSchedule(n, n, **kw),
    scheduler=lambda n,micro=1,**kw: GradientAccumulationScheduler({0:-(-n//micro)}, **kw))

def learner(dls, cbs=None):
    learn = toy(4, cbs=cbs)
    learn.dls = dls
    return learn

def find(learn, cbs):
    learn.add_cbs(cbs)
    learn.lr_find(num_it=20, show_plot=False)
fits = dict(one_cycle=lambda l,cbs: l.fit_one_cycle(2, 0.1, cbs=cbs), constant=lambda l,cbs: l.fit(2, 0.1, cbs=cbs), lr_find=find)

@pytest.mark.parametrize('kind,fit,make', some(24, [(k,f,m) for k in loaders for f in fits for m in makes]))
def test_by_default_it_goes_where_the_loaders_last_batch_goes(kind, fit, make):
    "Loaders of both sizes, made the same way; all three callbacks"
    r = random.Random(f'{kind} {fit} {make}')
    micro = r.randint(1, 8)
    macro = r.randint(micro, 30)
    big = -(-macro//micro)*micro
    n = r.randint(big, 110)
    acc = makes[make](macro, **dict(micro=micro) if make=='scheduler' else {})
    a,b = (learner(loaders[kind](toy_data(n), bs)) for bs in (big,micro))
    plan = acc.plan(b.dls, 2)
    fits[fit](a, []); fits[fit](b, [acc])
    assert_twins(a, b)
    assert acc.drop_last is None and plan.drop_last==(kind!='keeps')
    assert plan.steps==[len(a.dls.train)]*2 and sum(plan.sizes[0])==(n//big*big if plan.drop_last else n)

@pytest.mark.parametrize('drop_last,steps', [(None,3),(True,3),(False,4)])
@pytest.mark.parametrize('make', makes)
def test_what_it_is_told_comes_before_what_the_loader_does(drop_last, steps, make):
    learn = learner(from_dsets(toy_data(104), 8))
    acc = makes[make](32, drop_last=drop_last, **dict(micro=8) if make=='scheduler' else {})
    assert acc.plan(learn.dls).steps==[steps]
    learn.fit(1, 0.1, cbs=acc)
    assert len(learn.recorder.losses)==steps

@pytest.mark.parametrize('n,macro', [(71,10),(70,16),(64,16)])
def test_dropped_samples_do_not_reach_the_model(n, macro):
    "BatchNorm never sees them, and an `accum_bs` that is no multiple is full where micro-batches fill it"
    model = lambda: nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,3)).double()
    trained,full = Seen('after_pred', lambda l: len(l.x)),-(-macro//4)*4
    learn = toy(4, n=n, model=model, splitter=lambda m: [list(m.parameters())])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')   # BatchNorm
        learn.fit(2, 0.05, cbs=[GradientAccumulation(macro, drop_last=True),trained])
    assert sum(trained.values)==2*(n//full*full) and learn.model[1].num_batches_tracked==2*(n//full*full//4)
    assert_twins(*twins(macro=macro, n=n, acc=dict(drop_last=True)))

# Epochs that would have no step

@contextmanager
def warned(*texts):
    "Exactly these warnings about steps, in this order"
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        yield
    ours = [str(o.message) for o in w if 'step' in str(o.message)]
    assert len(ours)==len(texts) and all(t in o for t,o in zip(texts, ours)), ours

@pytest.mark.parametrize('fit', ['one_cycle','constant'])
def test_an_epoch_with_nothing_else_steps_on_what_there_is(fit):
    "Where the loader drops, and an epoch has too few samples for one step; it is said once. Asked for, it is refused"
    a,b = learner(DataLoaders(DataLoader(toy_data(21), bs=20, n=20), DataLoader(valid, bs=20))),learner(from_dsets(toy_data(21), 4))
    fits[fit](a, [])
    with warned('would hold no step'): fits[fit](b, [GradientAccumulation(32)])
    assert_twins(a, b)
    with warned('would hold no step'): fits['lr_find'](learner(from_dsets(toy_data(21), 4)), GradientAccumulation(32))
    with warned(), pytest.raises(ValueError, match='would hold no step'):
        learner(from_dsets(toy_data(21), 4)).fit(1, cbs=GradientAccumulation(32, drop_last=True))
    with warned(): learner(from_dsets(toy_data(21), 4)).fit(1, cbs=GradientAccumulation(32, drop_last=False))

def test_only_the_epochs_that_would_be_empty_are_kept():
    learn,acc = learner(from_dsets(toy_data(41), 4)),GradientAccumulationScheduler({0:3, 1:20, 2:4})
    assert acc.plan(learn.dls, 3).sizes==[[12,12,12],[40],[16,16]]
    with warned('epoch 1 would hold no step'): learn.fit(3, 0.1, cbs=acc)
    assert learn.recorder.accum_bs==[12,12,12,80,16,16] and len(learn.recorder.losses)==6

@pytest.mark.filterwarnings('ignore')
def test_an_epoch_that_is_cut_short_keeps_its_only_step():
    learn = learner(from_dsets(toy_data(23), 4))
    learn.fit(1, 0.1, cbs=[GradientAccumulation(32),ShortEpochCallback(pct=0.5)])
    assert len(learn.recorder.losses)==1

def test_a_loader_that_changes_its_mind_between_epochs():
    class Keep(Callback):
        def before_epoch(self): self.learn.dls.train.drop_last = not self.epoch
    learn = learner(from_dsets(toy_data(72), 8))
    learn.fit(3, 0.1, cbs=[GradientAccumulation(32),Keep()])
    assert len(learn.recorder.losses)==2+3+3

@pytest.mark.parametrize('make', makes)
@pytest.mark.parametrize('o', [0,1,'loader',(),1.], ids=str)
def test_anything_else_is_refused(make, o):
    with pytest.raises(TypeError, match='drop_last'): makes[make](8, drop_last=o)
