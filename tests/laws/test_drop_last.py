"""`drop_last` drops the incomplete last step of an epoch

By default, it is dropped if the loader drops its last batch.
"""
import pytest, random, torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, SequentialSampler
from torch.utils.data.datapipes.iter import IterableWrapper
from fastai.vision.all import DataLoader, DataLoaders, params
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.testing import assert_same_run, one_cycle, toy, toy_data
from common import RecordAt, pick_cases
from small_learners import with_loaders
from test_warned import count_warnings

valid = toy_data(9, seed=1)
# Functions that make loaders with batches of `bs` samples. All but `keeping_last` drop an incomplete
# last batch

def from_dsets(ds, bs): return DataLoaders.from_dsets(ds, valid, bs=bs, shuffle=False, num_workers=0)
def keeping_last(ds, bs): return DataLoaders(DataLoader(ds, bs=bs), DataLoader(valid, bs=bs))
def of_torch(ds, bs):   # at its end, torch's sampler draws one more random number
    train = TorchLoader(ds, bs, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))
    return DataLoaders(train, TorchLoader(valid, bs))
def stream(ds, bs):   # a list of items, because torch's loader also fetches the items that it drops
    return DataLoaders(TorchLoader(IterableWrapper(ds.items), bs, drop_last=True), TorchLoader(valid, bs))
def sampler(ds, bs):
    batches = BatchSampler(SequentialSampler(ds), bs, drop_last=True)
    return DataLoaders(TorchLoader(ds, batch_sampler=batches), TorchLoader(valid, bs))

def run_lr_find(learn, cbs): learn.add_cbs(cbs).lr_find(num_it=20, show_plot=False)

makes = dict(plain=lambda n,_,**kw: GradientAccumulation(n, **kw),
    schedule=lambda n,_,**kw: GradientAccumulationSchedule(n, n, **kw),
    scheduler=lambda n,micro,**kw: GradientAccumulationScheduler({0:-(-n//micro)}, **kw))

class DrawsForItems:
    "A dataset that draws a random number for each item, as a random transform of items does"
    n_inp = 1   # without `n_inp`, fastai would fetch one more item to count the parts of an item
    def __init__(self, n): self.items = toy_data(n)
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i][0]+random.random(),self.items[i][1]

def learner(dls): return with_loaders(toy(4), *dls.loaders)
def small(): return learner(from_dsets(toy_data(21), 4))   # too few samples for a step of 32

@pytest.mark.parametrize('loaders,fit,make', pick_cases(25, [(l,f,m)
    for l in (from_dsets,keeping_last,of_torch,stream,sampler) for f in (one_cycle,run_lr_find)
    for m in makes for _ in range(2)]))
def test_by_default_the_last_step_is_dropped_if_the_loader_drops_its_last_batch(loaders, fit, make):
    "For dropped items, random numbers are drawn as by a loader of full batches"
    r = random.Random(f'{loaders.__name__} {fit.__name__} {make}')
    micro = r.randint(1, 8)
    accum_bs = r.randint(micro, 30)
    full = -(-accum_bs//micro)*micro   # samples of a step: `accum_bs` rounded up to whole micro-batches
    n = r.randint(full, 110)
    a,b,acc = *(learner(loaders(DrawsForItems(n), bs)) for bs in (full,micro)),makes[make](accum_bs, micro)
    plan = acc.plan(b.dls, 2)
    for learn,cbs in ((a,[]),(b,[acc])):
        random.seed(0)
        fit(learn, cbs)
    assert_same_run(a, b)
    assert acc.drop_last is None and plan.drop_last==(loaders is not keeping_last)
    assert plan.steps==[len(a.dls.train)]*2 and sum(plan.sizes[0])==(n//full*full if plan.drop_last else n)

@pytest.mark.parametrize('make', makes)
def test_the_argument_overrides_the_loader(make):
    for drop_last,steps in ((None,3),(True,3),(False,4)):
        learn,acc = learner(from_dsets(toy_data(104), 8)),makes[make](32, 8, drop_last=drop_last)
        assert acc.plan(learn.dls).steps==[steps]
        learn.fit(1, 0.1, cbs=acc)
        assert len(learn.recorder.losses)==steps

@pytest.mark.filterwarnings('ignore:1 BatchNorm layer')
@pytest.mark.parametrize('n,accum_bs', [(71,10),(70,16),(64,16)])
def test_dropped_samples_do_not_reach_the_model(n, accum_bs):
    """BatchNorm does not see them either

    A step has `accum_bs` samples, rounded up to whole micro-batches.
    """
    model = lambda: nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,3)).double()
    trained,full = RecordAt('after_pred', lambda l: len(l.x)),-(-accum_bs//4)*4
    learn = toy(4, n=n, model=model, splitter=params)
    learn.fit(2, 0.05, cbs=[GradientAccumulation(accum_bs, drop_last=True),trained])
    assert sum(trained.values)==2*(n//full*full) and learn.model[1].num_batches_tracked==2*(n//full*full//4)

# Epochs with too few samples for a step

no_step = {('','no-step'):1}

def test_an_epoch_with_too_few_samples_for_a_step_is_one_step():
    "The fit warns once; with `drop_last=True` it is refused, with `drop_last=False` it does not warn"
    a,b = learner(DataLoaders(DataLoader(toy_data(21), bs=20, n=20), DataLoader(valid, bs=20))),small()
    one_cycle(a, [])
    assert count_warnings(lambda: one_cycle(b, [GradientAccumulation(32)]))==no_step
    assert_same_run(a, b)
    assert count_warnings(lambda: run_lr_find(small(), GradientAccumulation(32)))==no_step
    with pytest.raises(ValueError, match='too few for a step of 30 .32 in whole batches of .*Lower `accum_bs`'):
        one_cycle(small(), GradientAccumulation(30, drop_last=True))
    with pytest.raises(ValueError, match='Lower `n_batches`'):
        one_cycle(small(), GradientAccumulation(n_batches=8, drop_last=True))
    assert not count_warnings(lambda: one_cycle(small(), GradientAccumulation(32, drop_last=False)))

def test_only_epochs_that_would_have_no_step_keep_their_incomplete_step():
    learn,acc = learner(from_dsets(toy_data(41), 4)),GradientAccumulationScheduler({0:3, 1:20, 2:4})
    assert acc.plan(learn.dls, 3).sizes==[[12,12,12],[40],[16,16]]
    assert count_warnings(lambda: learn.fit(3, 0.1, cbs=acc))==no_step
    assert learn.recorder.accum_bs==[12,12,12,80,16,16] and len(learn.recorder.losses)==6
