"Recalibrated statistics of BatchNorm are means over whole batches, and frozen statistics do not change."
import numpy as np, pytest, random, torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from fastai.vision.all import DataLoader, Learner, MixUp, Module, SaveModelCallback, set_seed
from fastaccum import FreezeBN, GradientAccumulation, GradientAccumulationScheduler, RecalibrateBN
from fastaccum.testing import deviation, toy, toy_data
from common import CallAt, RaiseAt, RecordAt
from small_learners import all_params, cross_entropy, silence_in_double, tensor_loaders

def body(*more): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), *more, nn.Dropout(), nn.Linear(6, 3)).double()
def small(bs=4, n=64, **kwargs): return toy(bs, n=n, **dict(dict(model=body, splitter=all_params), **kwargs))
def stats(learn): return torch.cat([o.flatten().double() for o in learn.model.buffers()])

def is_mean_of(learn, bs, k, x=None):
    "Return whether the layer's statistics are means over the first `k` batches of `bs` samples"
    bn,x = learn.model[1],torch.stack([o for o,_ in learn.dls.train.dataset]) if x is None else x
    with torch.no_grad(): parts = learn.model[0](x)[:k*bs].split(bs)
    expected = [torch.stack([f(o) for o in parts]).mean(0) for f in (lambda o: o.mean(0),lambda o: o.var(0))]
    return deviation(expected, [bn.running_mean,bn.running_var])<1e-10 and bn.num_batches_tracked==k

# Recalibrated statistics

@given(st.integers(2, 90), st.integers(2, 40), st.integers(2, 8), st.none()|st.integers(1, 90), st.booleans())
def test_statistics_are_the_mean_over_whole_batches(n, bs, micro, limit, torchs):
    "The mean is over all whole batches within the first `limit` samples, and over at least one batch"
    learn = small(micro, n)
    if torchs: learn.dls.train = TorchLoader(toy_data(n), micro, drop_last=n%2==0)
    learn.model[1].running_mean += 1
    learn.recalibrate_bn(bs, limit)
    assert is_mean_of(learn, min(bs, n), max(1, min(limit or n, n)//min(bs, n)))

@pytest.mark.parametrize('bs,want,cb', [(4,64,None), (100,100,None), (4,16,lambda: GradientAccumulation(16)),
    (4,200,lambda: GradientAccumulation(1000)), (4,32,lambda: GradientAccumulationScheduler({0:2, 1:8}))])
@pytest.mark.filterwarnings('ignore')
def test_by_default_recalibration_has_batches_as_large_as_a_step(bs, want, cb):
    "Without accumulation: of the loader's size, but at least 64 samples, and at most the dataset"
    learn = small(bs, 200, cbs=cb and cb())
    if want==32 and bs==4: learn.fit(2, 0.1)
    learn.recalibrate_bn()
    assert is_mean_of(learn, want, 200//want)

def test_the_batches_of_a_loader_without_a_batch_size_are_not_changed():
    (x,y),learn = toy_data(64).tensors,small()
    ready_made = list(zip(x.split(8), y.split(8)))
    for batches,args,match in ((ready_made,[16],'ready-made.*changed to 16'), ([],[],'no batch')):
        learn.dls.train = batches
        if batches: learn.recalibrate_bn()
        with pytest.raises(ValueError, match=match): learn.recalibrate_bn(*args)
        assert is_mean_of(learn, 8, 8, x)

def test_recalibration_reads_the_inputs_of_the_loader_without_dropout_and_callbacks():
    "The model has a layer without weights and with a cumulative average, and one without statistics"
    class Two(Module):
        def __init__(self):
            self.drop,self.bn,self.lin = nn.Dropout(0.9),nn.BatchNorm1d(5, momentum=None, affine=False),nn.Linear(5, 3)
            self.more = nn.BatchNorm1d(5, track_running_stats=False)
        def forward(self, a, b): return self.lin(self.more(self.bn(self.drop(a+b))))
    x,y = toy_data(32).tensors
    learn = silence_in_double(Learner(tensor_loaders(x, 3*x, y, bs=4), Two(), cross_entropy))
    events = RecordAt('before_batch', lambda l: 1)
    with learn.added_cbs([MixUp(),events]): learn.recalibrate_bn(8)
    want = torch.stack([o.var(0) for o in (4*x).split(8)]).mean(0)
    assert deviation([learn.model.bn.running_mean,learn.model.bn.running_var], [4*x.mean(0),want])<1e-10
    assert learn.model.bn.momentum is None and learn.model.bn.num_batches_tracked==4 and not events.values

# Nothing else changes

@pytest.mark.parametrize('torchs', [False,True])
@pytest.mark.parametrize('how', ['call','callback'])
def test_training_goes_on_as_if_nothing_had_happened(torchs, how):
    "The loaders shuffle, and fastai's loader has a transform of batches that draws random numbers"
    def noise(b): return b[0]+torch.randn_like(b[0])+random.random()+np.random.rand(),b[1]
    def run(how=None):
        learn = small(cbs=GradientAccumulation(16))
        set_seed(0)
        gen = torch.Generator().manual_seed(1)
        learn.dls.train = (TorchLoader(toy_data(70), 4, shuffle=True, generator=gen) if torchs
            else DataLoader(toy_data(70), bs=4, shuffle=True, after_batch=noise))
        for _ in range(2):
            learn.fit(2, 0.1, cbs=[RecalibrateBN()]*(how=='callback'))
            if how=='call': learn.recalibrate_bn()
        return [*learn.model.parameters()],learn.recorder.losses,[m.training for m in learn.model.modules()]
    assert deviation(run(), run(how))==0

@pytest.mark.parametrize('exc,in_fit', [(KeyboardInterrupt,True), (torch.OutOfMemoryError,False)])
def test_interrupts_and_errors_leave_the_statistics_as_they_were(exc, in_fit):
    """The second batch of 24 samples fails

    Training has batches of 4, so this batch belongs to the recalibration.
    """
    learn,noted,sizes = small(n=70),RecordAt('after_train', stats),[]
    def fail(m, i):
        sizes.append(len(i[0]))
        if sizes.count(24)==2: raise exc('planted')
    learn.model[2].register_forward_pre_hook(fail)
    learn.fit(1, 0.1, cbs=noted)
    rng = torch.get_rng_state()
    with pytest.raises(exc, match='planted' if exc is KeyboardInterrupt else 'a batch of 24.*planted'):
        if in_fit: learn.fit(1, 0.1, cbs=[noted,RecalibrateBN(24)])
        else: learn.recalibrate_bn(24)
    assert stats(learn).equal(noted.values[-1]) and learn.dls.train.bs==4 and learn.model[1].momentum==0.1
    assert in_fit or torch.get_rng_state().equal(rng) and not learn.model[1].training

# The callback

def test_validation_and_saved_models_have_the_recalibrated_statistics(tmp_path):
    learn = small(path=tmp_path)
    learn.fit(3, 0.1, cbs=[GradientAccumulation(16),RecalibrateBN(),SaveModelCallback(every_epoch=True)])
    assert is_mean_of(learn, 16, 4) and deviation(learn.recorder.values[-1][1], learn.validate()[0])<1e-6
    learn.load('model_0')
    assert is_mean_of(learn, 16, 4)   # the file of the first epoch also has recalibrated statistics

def test_the_callback_acts_in_training_only():
    "In validation, prediction and `lr_find` it does nothing; the method can still be called"
    learn,seen = small(cbs=RecalibrateBN(16)),[]
    learn.model[0].register_forward_hook(lambda m,i,o: seen.append(len(o)))
    before = stats(learn)
    learn.validate(), learn.get_preds()
    learn.lr_find(num_it=20, show_plot=False, suggest_funcs=None)   # 20 batches are more than an epoch
    assert stats(learn).equal(before) and 16 not in seen
    learn.fit(1, 0.1)
    assert is_mean_of(learn, 16, 4)
    learn.recalibrate_bn(8)
    assert is_mean_of(learn, 8, 8)

# Frozen layers

def test_the_statistics_of_frozen_layers_are_not_recalibrated():
    learn = small(model=lambda: body(nn.Linear(6, 6), nn.BatchNorm1d(6)).double())
    first,last = learn.model[1],learn.model[3]
    for p in first.parameters(): p.requires_grad_(False)
    learn.recalibrate_bn(16)
    assert (first.num_batches_tracked,last.num_batches_tracked)==(0,4)
    learn.add_cb(FreezeBN(lambda m: m[2:]))
    with pytest.raises(ValueError, match='all BatchNorm layers are frozen'): learn.recalibrate_bn(16)
    with pytest.warns(UserWarning, match='all BatchNorm layers are frozen'): learn.fit(1, 0.1, cbs=RecalibrateBN())
    # `FreezeBN` does not freeze the first layer
    assert last.num_batches_tracked==4 and first.num_batches_tracked==16

def test_statistics_stay_frozen_if_a_callback_calls_train_but_not_after_an_interrupt():
    learn = small(cbs=[CallAt('after_backward', lambda l: l.model.train())])
    before = stats(learn)
    learn.fit(1, 0.1, cbs=FreezeBN())
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[FreezeBN(),RaiseAt('after_pred', KeyboardInterrupt, 0)])
    assert stats(learn).equal(before) and learn.model[1].training
    learn.fit(1, 0.1)
    assert not stats(learn).equal(before)
