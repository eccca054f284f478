"What cannot work is refused, by name and with a remedy, before a weight moves and with nothing left behind."
import warnings
import numpy as np, pytest, torch
from fastai.callback.fp16 import NonNativeMixedPrecision
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.data.load import DataLoader
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_twins, toy
from common import weights

@pytest.mark.parametrize('nm', ['accum_bs','n_acc','micro_batch_size'])
@pytest.mark.parametrize('n,exc', [(0,ValueError), (-8,ValueError), (64.,TypeError), (2.5,TypeError), ('64',TypeError),
                                   (True,TypeError),
                                   (False,TypeError), ([64],TypeError), (torch.tensor(64),TypeError),
                                   (float('nan'),TypeError)], ids=str)
def test_bad_counts(nm, n, exc):
    with pytest.raises(exc) as e: GradientAccumulation(**{nm:n})
    assert nm in str(e.value) and repr(n) in str(e.value) and 'give' in str(e.value)

def test_good_counts():
    for n in (1, 64, np.int64(64), np.uint8(64)): assert GradientAccumulation(n).accum_bs==n
    assert GradientAccumulation().accum_bs==32 and GradientAccumulation(n_acc=8).accum_bs==8
    assert GradientAccumulation(None, 8).accum_bs==8
    assert GradientAccumulation(16, 8).accum_bs==16

def test_order_of_the_arguments():
    "The contract, and what happens to code that has another order in mind"
    import inspect
    params = {k:p.default for k,p in inspect.signature(GradientAccumulation).parameters.items()}
    assert list(params.items())==[('accum_bs',None), ('n_acc',32), ('log_accum_batch',True), ('micro_batch_size',None),
        ('drop_last',None), ('size',None), ('sync_each',None)]
    with pytest.raises(TypeError, match='log_accum_batch=16'): GradientAccumulation(256, 32, 16)

@pytest.mark.parametrize('kwargs,exc,msg', [
    (dict(micro_batch_size='big'), TypeError, "micro_batch_size='big'.*give 'auto', or a whole number"),
    (dict(micro_batch_size='4'), TypeError, 'micro_batch_size'),
    (dict(micro_batch_size=2.), TypeError, 'micro_batch_size=2.0'),
    (dict(micro_batch_size=0), ValueError, 'micro_batch_size=0'),
    (dict(drop_last='no'), TypeError, "drop_last='no'"), (dict(log_accum_batch=0), TypeError, 'log_accum_batch=0'),
    (dict(size=4), TypeError, 'size=4'), (dict(sync_each=1), TypeError, 'sync_each=1'),
    (dict(acum_bs=4), TypeError, 'acum_bs')], ids=str)
def test_bad_arguments(kwargs, exc, msg):
    with pytest.raises(exc, match=msg): GradientAccumulation(**kwargs)

def refused(learn, acc, msg, exc=ValueError, fit=lambda l,cbs: l.fit_one_cycle(1, 0.1, cbs=cbs)):
    "The fit raises `exc` before a weight moves, also with progress bars, and a plain fit works as ever afterwards"
    learn.add_cb(ProgressCallback())
    learn.create_opt()
    before,logger = weights(learn),learn.logger
    with pytest.raises(exc, match=msg): fit(learn, acc)
    assert weights(learn).equal(before) and learn.logger is logger
    assert not any('after_batch' in vars(o) for o in learn.cbs)
    learn.remove_cbs([GradientAccumulation,FastaiGradientAccumulation,NonNativeMixedPrecision,ProgressCallback])
    for p in learn.model.parameters(): p._post_accumulate_grad_hooks = None
    fresh = toy(4, n=70)
    for o in (fresh,learn): o.fit(1, 0.1)
    assert_twins(fresh, learn)

def test_two_accumulation_callbacks():
    refused(toy(4, n=70), [GradientAccumulation(16),GradientAccumulation(8)], '2 callbacks accumulate.*remove_cb')
    refused(toy(4, n=70, cbs=FastaiGradientAccumulation(16)), GradientAccumulation(8), '2 callbacks accumulate')

def test_non_native_mixed_precision():
    refused(toy(4, n=70), [NonNativeMixedPrecision(),GradientAccumulation(8)], r'to_fp16\(\)')

def test_optimizer_that_steps_inside_backward():
    learn = toy(4, n=70)
    learn.model[2].weight.register_post_accumulate_grad_hook(lambda p: None)
    refused(learn, GradientAccumulation(8), "'2.weight' has a hook.*Remove the hook")

def test_epoch_without_a_step():
    refused(toy(4, n=70), GradientAccumulation(80, drop_last=True),
        '70 samples do not fill a macro-batch of 80.*drop_last')

def test_lr_find_without_a_step():
    learn = toy(4, n=70, cbs=GradientAccumulation(80, drop_last=True))
    with pytest.raises(ValueError, match='70 samples.*drop_last'): learn.lr_find(show_plot=False)

def test_last_full_macro_batch_is_enough():
    b = toy(4, n=70)
    b.fit(1, 0.1, cbs=GradientAccumulation(68, drop_last=True))
    assert len(b.recorder.losses)==1

def test_contradicting_micro_batch_size():
    refused(toy(4, n=70), GradientAccumulation(16, micro_batch_size=8), 'micro_batch_size=8.*batches of 4.*`bs=8`')

def test_loader_without_a_batch_size():
    "A loader of ready-made batches: refused without `micro_batch_size`, right with it"
    def make(bs):
        learn = toy(bs, n=64)
        dl = learn.dls.train
        learn.dls.loaders[0] = DataLoader(list(dl), bs=None)
        return learn
    with pytest.raises(ValueError, match='pass `micro_batch_size=`'): make(4).fit(1, 0.1, cbs=GradientAccumulation(16))
    a,b = make(16),make(4)
    a.fit(2, 0.1); b.fit(2, 0.1, cbs=GradientAccumulation(16, micro_batch_size=4))
    assert_twins(a, b)

def test_micro_batches_larger_than_accum_bs_warn():
    a,b = toy(16, n=70),toy(16, n=70)
    a.fit(1, 0.1)
    with pytest.warns(UserWarning, match='micro-batches of 16 are larger than `accum_bs=8`'):
        b.fit(1, 0.1, cbs=GradientAccumulation(8))
    assert_twins(a, b)

def test_no_warnings_otherwise():
    "None from us, not even when the model has attributes of our names"
    learn = toy(4, n=70)
    for nm in ('n','steps','size','macro','listeners','at','micro_bs','target'): setattr(learn.model, nm, 1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit_one_cycle(1, 0.1, cbs=GradientAccumulation(16))

def test_target_that_cannot_be_counted():
    "An `ignore_index` and a target that is no tensor"
    from test_fits import structured
    learn = structured(4, 'dict')
    loss = learn.loss_func
    class Loss(torch.nn.Module):
        ignore_index = 0
        def forward(self, p, y): return loss(p, y)
    learn.loss_func = Loss()
    before = weights(learn)
    with pytest.raises(TypeError, match='pass `size='): learn.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert weights(learn).equal(before)

def test_a_callback_is_on_one_learner():
    "Added to a second Learner it leaves the first, with a warning, and accumulates on the second"
    acc = GradientAccumulation(16)
    a,b,big,plain = toy(4, n=70, cbs=acc),toy(4, n=70),toy(16, n=70),toy(4, n=70)
    with pytest.warns(UserWarning, match='was on another Learner'): b.add_cb(acc)
    for o in (a,b,big,plain): o.fit(1, 0.1)
    assert_twins(big, b)
    assert_twins(plain, a)
