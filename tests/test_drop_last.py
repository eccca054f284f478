"""`drop_last=None`, the default: the remainder goes where the training loader's own last batch goes, as in the big
batch's run."""
import random, warnings
import pytest, torch
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace as NS
from torch import distributed as dist, nn
from torch.utils.data import BatchSampler, DataLoader as TorchLoader, SequentialSampler
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import ShortEpochCallback
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.data.transforms import IndexSplitter
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastcore.basics import noop
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.checks import drops_last
from fastaccum.core.macro_batch import round_up
from fastaccum.processes.sync import Together
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, toy_data

def from_dsets(ds, bs): return DataLoaders.from_dsets(ds, toy_data(9, seed=1), bs=bs, shuffle=False, num_workers=0)

def data_block(ds, bs):
    "As users make them, but in a fixed order: shuffled, the loaders of two sizes draw other orders"
    n,every = len(ds),[*ds,*toy_data(9, seed=1)]
    def x(i): return every[i][0]
    def y(i): return every[i][1]
    return DataBlock(get_x=x, get_y=y, splitter=IndexSplitter(range(n, n+9))).dataloaders(range(n+9), bs=bs,
        shuffle=False, drop_last=True, num_workers=0)

def torch_loaders(ds, bs):
    return DataLoaders(TorchLoader(ds, batch_size=bs, drop_last=True), TorchLoader(toy_data(9, seed=1), batch_size=bs))

def torch_samplers(ds, bs):
    sampler = BatchSampler(SequentialSampler(ds), bs, drop_last=True)
    return DataLoaders(TorchLoader(ds, batch_sampler=sampler), TorchLoader(toy_data(9, seed=1), batch_size=bs))

loaders = dict(from_dsets=from_dsets, data_block=data_block, torch=torch_loaders, batch_sampler=torch_samplers)

def learner(dls, cbs=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3)).double()
    learn = Learner(dls, model, CrossEntropy(), opt_func=partial(SGD, mom=0.9), cbs=cbs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn.add_cb(Float32Loss())

def no_drop(make):
    def f(ds, bs):
        dls = make(ds, bs)
        dls.train.drop_last = False
        return dls
    return f
loaders['keeps'] = no_drop(from_dsets)

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 0.1, cbs=cbs)
def constant(learn, cbs): learn.fit(2, 0.1, cbs=cbs)
def find(learn, cbs):
    learn.add_cbs(cbs)
    learn.lr_find(num_it=20, show_plot=False)
fits = dict(one_cycle=one_cycle, constant=constant, lr_find=find)

accs = dict(plain=GradientAccumulation, schedule=lambda k,**kw: GradientAccumulationSchedule(k, k, **kw),
            scheduler=lambda k,micro=1,**kw: GradientAccumulationScheduler({0:-(-k//micro)}, **kw))

@pytest.mark.parametrize('kind', loaders)
@pytest.mark.parametrize('fit', fits)
@pytest.mark.parametrize('seed', range(3))
def test_the_remainder_goes_where_the_loaders_last_batch_goes(kind, fit, seed):
    "Loaders of both sizes, made the same way; all three callbacks"
    r = random.Random(f'{kind} {fit} {seed}')
    micro,acc = r.randint(1, 8),list(accs)[seed]
    macro = r.randint(micro, 30)
    big = round_up(macro, micro)
    n = r.randint(big, 110)
    ds = toy_data(n)
    a,b = (learner(loaders[kind](ds, bs)) for bs in (big,micro))
    kwargs = dict(micro=micro) if acc=='scheduler' else {}
    cb = accs[acc](macro, **kwargs)
    plan = cb.plan(b.dls, 2)
    fits[fit](a, []); fits[fit](b, [cb])
    assert_twins(a, b)
    assert cb.drop_last is None and plan.drop_last==(kind!='keeps')
    assert plan.steps==[len(a.dls.train)]*2 and sum(plan.sizes[0])==(n//big*big if plan.drop_last else n)

def test_the_data_block_of_the_issue():
    "104 samples and steps of 32, with the default arguments: three steps, as in batches of 32"
    dls = {bs:DataLoaders.from_dsets(toy_data(104), toy_data(9, seed=1), bs=bs, shuffle=False, num_workers=0)
        for bs in (8,32)}
    a,b = learner(dls[32]),learner(dls[8])
    one_cycle(a, []); one_cycle(b, [GradientAccumulation(32)])
    assert_twins(a, b)
    assert len(b.recorder.losses)==2*3
    c = learner(dls[8])
    one_cycle(c, [GradientAccumulation(32, drop_last=False)])
    assert len(c.recorder.losses)==2*4

@pytest.mark.parametrize('acc', [lambda **kw: GradientAccumulationSchedule(8, 40, **kw),
    lambda **kw: GradientAccumulationScheduler({0:2, 1:5}, **kw)])
def test_schedules_leave_out_the_same_as_with_true(acc):
    runs = []
    for kwargs in ({},dict(drop_last=True)):
        learn,cb = learner(from_dsets(toy_data(104), 8)),acc(**kwargs)
        plan = cb.plan(learn.dls, 3)
        assert plan.drop_last and cb.plot_sched(learn.dls, 3)[1].lines[0].get_ydata()[-1]==sum(plan.steps)
        learn.fit_one_cycle(3, 0.1, cbs=cb)
        assert len(learn.recorder.losses)==sum(plan.steps)
        runs.append(learn)
    assert_twins(*runs)

@contextmanager
def warned(*texts):
    "Exactly these warnings of ours, in this order"
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        yield
    ours = [str(o.message) for o in w if 'step' in str(o.message)]
    assert len(ours)==len(texts) and all(t in o for t,o in zip(texts, ours)), ours

@pytest.mark.parametrize('fit', ['one_cycle','constant'])
def test_an_epoch_with_nothing_else_steps_on_the_remainder(fit):
    """Where the loader drops, and an epoch has too few samples for one step: its step is that of all its samples,
    and said so once"""
    ds = toy_data(21)
    a = learner(DataLoaders(DataLoader(ds, bs=20, n=20), DataLoader(toy_data(9, seed=1), bs=20)))
    b = learner(from_dsets(ds, 4))
    fits[fit](a, [])
    acc = GradientAccumulation(32)
    with warned('epoch 0 would hold no step if its remainder were left out'): fits[fit](b, [acc])
    assert_twins(a, b)
    with warned('20 samples do not fill a macro-batch of 32'):
        learner(from_dsets(ds, 4), GradientAccumulation(32)).lr_find(num_it=5, show_plot=False)
    with warned(), pytest.raises(ValueError, match='would hold no step.*20 samples do not fill a macro-batch of 32'):
        learner(from_dsets(ds, 4)).fit(1, cbs=GradientAccumulation(32, drop_last=True))
    with warned(): learner(from_dsets(ds, 4)).fit(1, cbs=GradientAccumulation(32, drop_last=False))

def test_only_the_epochs_that_would_be_empty_are_kept():
    learn,acc = learner(from_dsets(toy_data(41), 4)),GradientAccumulationScheduler({0:3, 1:20, 2:4})
    assert acc.plan(learn.dls, 3).sizes==[[12,12,12],[40],[16,16]]
    with warned('epoch 1 would hold no step'): learn.fit(3, 0.1, cbs=acc)
    assert learn.recorder.accum_bs==[12,12,12,80,16,16] and len(learn.recorder.losses)==6

def test_an_epoch_cut_short():
    """What is left when the loop ends early is left out where remainders are, but for an epoch of one step that is
    short itself"""
    for n,bs,accum,expected in ((64,4,16,2), (23,4,32,1)):
        learn = learner(from_dsets(toy_data(n), bs))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            learn.fit(1, 0.1, cbs=[GradientAccumulation(accum),ShortEpochCallback(pct=0.5)])
        assert len(learn.recorder.losses)==expected

def test_a_loader_that_is_replaced_is_asked_again():
    "Between epochs, also when nothing but its `drop_last` changed"
    class Keep(Callback):
        def before_epoch(self): self.learn.dls.train.drop_last = not self.epoch
    learn = learner(from_dsets(toy_data(72), 8))
    learn.fit(3, 0.1, cbs=[GradientAccumulation(32),Keep()])
    assert len(learn.recorder.losses)==2+3+3

def test_what_loaders_say():
    ds = toy_data(20)
    class Silent:
        def __iter__(self): return iter(())
    for dl,drops in ((Silent(),False), (DataLoader(ds, bs=4),False), (DataLoader(ds, bs=4, drop_last=True),True),
                     (TorchLoader(ds, batch_size=4),False), (TorchLoader(ds, batch_size=4, drop_last=True),True),
                     (NS(dl=DataLoader(ds, bs=4, drop_last=True)),True), (NS(dl=DataLoader(ds, bs=4)),False),
                     (TorchLoader(ds, batch_sampler=BatchSampler(SequentialSampler(ds), 4, True)),True),
                     (NS(dl=TorchLoader(ds, batch_sampler=BatchSampler(SequentialSampler(ds), 4, True))),True),
                     (TorchLoader(ds, batch_size=None),False)):
        assert drops_last(None, dl) is drops
        for o in (True,False): assert drops_last(o, dl) is o

@pytest.mark.parametrize('make', [GradientAccumulation, lambda **kw: GradientAccumulationSchedule(8, 16, **kw),
    lambda **kw: GradientAccumulationScheduler({0:2}, **kw)])
def test_bad_values(make):
    for o in (0, 1, 'loader', 'no', (), 1.):
        with pytest.raises(TypeError, match='`drop_last=.*give True, False, or None: as the training loader does'):
            make(drop_last=o)
    for o in (None,True,False): assert make(drop_last=o).drop_last is o
    assert make().drop_last is None

# Several processes: what `drop_last` comes to is what has to agree

class Shared(Together):
    "A `Together` without processes"
    def __init__(self, rank, world):
        self.rank,self.world,self.device,self.group,self.stock = rank,world,'cpu',None,None
        self.model = nn.Sequential()
        self.model.static_graph = False

def shared_plans(monkeypatch, dls, **kwargs):
    """The plans of processes with these loaders, each with a callback of arguments `kwargs`, of which some may be a
    list with an entry for each"""
    accs = [GradientAccumulation(**{k:v[i] if isinstance(v, list) else v for k,v in kwargs.items()})
        for i in range(len(dls))]
    for o in accs: o.learn = NS(n_epoch=2, cbs=[], model=nn.Sequential())
    told = []
    def look(i):
        def all_gather(res, mine, group):
            if len(told)==len(dls): return [r.copy_(o) for r,o in zip(res, told)]
            told.append(mine)
        monkeypatch.setattr(dist, 'all_gather', all_gather)
        monkeypatch.setattr(dist, 'get_world_size', lambda group: len(dls))
        return Shared(i, len(dls)).look(accs[i], dls[i])
    for i in range(len(dls)):
        with suppress(ValueError): look(i)
    return [Shared(i, len(dls)).plan(accs[i], look(i), 2) for i in range(len(dls))]

def test_processes_agree_on_what_it_comes_to(monkeypatch):
    drop,keep = DataLoader(range(35), bs=4, drop_last=True),DataLoader(range(35), bs=4)
    for kwargs in ({},dict(drop_last=[None,True])):
        for plan in shared_plans(monkeypatch, [drop,drop], accum_bs=16, **kwargs):
            assert plan.drop_last and plan.sizes==[[16]*4]*2 and [o[2] for o in plan.loaders]==[True,True]
    for kwargs in ({},dict(drop_last=[None,False])):
        for plan in shared_plans(monkeypatch, [keep,keep], accum_bs=16, **kwargs):
            assert not plan.drop_last and plan.sizes==[[16]*4+[6]]*2
    with pytest.raises(ValueError, match='`drop_last` is 1, 0 on the processes'):
        shared_plans(monkeypatch, [drop,keep], accum_bs=16)
    for plan in shared_plans(monkeypatch, [drop,keep], accum_bs=16, drop_last=False): assert plan.sizes==[[16]*4+[3]]*2
    for plan in shared_plans(monkeypatch, [drop,drop], accum_bs=100):
        assert plan.sizes==[[64]]*2 and plan.drop_last and not plan.drops(0)
