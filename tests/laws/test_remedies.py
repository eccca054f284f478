"""What a message tells the user to type works when it is typed, also with arguments that the user already has."""
import pytest, torch
from copy import deepcopy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchDataLoader
from fastai.text.all import Callback, CrossEntropyLossFlat, DataLoader, DataLoaders, Module
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientCache
from fastaccum.step.loader import LoaderSizes
from fastaccum.step.plan import Plan
from fastaccum.testing import assert_same_run, toy, toy_data
from common import BatchListLoader, CallAt, LimitedMemory, collect_warnings, in_chunks, nt_xent, runs_out_above
from small_learners import DoubleMixUp, MixUpLoss, all_params, language_model

def messages_of(learn, cbs, n_epoch=1, lr=1e-3):
    "Return the texts of the warnings of a fit"
    with collect_warnings() as collected: learn.fit(n_epoch, lr, cbs=cbs)
    return [str(o.message) for o in collected if '\nMore: ' in str(o.message)]

# The sizes in a remedy

def test_the_remedy_for_mixup_keeps_the_size_of_the_micro_batches():
    acc = GradientAccumulation(32, micro_batch_size=4)
    message, = messages_of(toy(8, n=64, loss_func=MixUpLoss()), [acc,DoubleMixUp()])
    assert '`bs=32`' in message and '`micro_batch_size=4`' in message
    assert not messages_of(toy(32, n=64, loss_func=MixUpLoss()), [acc,DoubleMixUp()])

class Remembers(Module):
    "A layer that adds the mean of its previous inputs, and is not from fastai"
    def __init__(self): self.lin,self.last = nn.Linear(5, 3),None
    def reset(self): self.last = None
    def forward(self, x):
        last,self.last = self.last,x.detach().mean(0)
        return self.lin(x if last is None else x+last)

def test_the_remedy_for_a_hidden_state_splits_the_batch_only_if_each_row_keeps_its_own_state():
    acc = GradientAccumulation(16)
    texts = language_model(0., loss_func=CrossEntropyLossFlat())
    of_fastai, = [o for o in messages_of(texts, acc) if '#hidden-state' in o]
    assert '`bs=16`, and use `micro_batch_size=8`' in of_fastai
    other, = messages_of(toy(8, n=64, model=lambda: Remembers().double(), splitter=all_params), acc)
    assert '`bs=16`, and use `fastaccum.ActivationCheckpoint()`' in other and 'micro_batch_size' not in other

def test_steps_smaller_than_a_batch_are_what_the_warning_says_how_to_get():
    message, = messages_of(toy(16), GradientAccumulation(4))
    assert 'For steps of 4 samples, also pass `micro_batch_size=4`' in message
    message, = messages_of(toy(16), GradientAccumulation(4, micro_batch_size='auto'))
    assert 'create the DataLoaders with `bs=4`' in message and 'also pass' not in message
    assert not messages_of(toy(4), GradientAccumulation(4, micro_batch_size='auto'))
    assert not messages_of(toy(16), GradientAccumulation(4, micro_batch_size=4))
    assert GradientAccumulation(4, micro_batch_size=4).plan(toy(16, n=64)).steps==[16]

@pytest.mark.parametrize('micro_bs,split_words,parts', [(8,'','whole batches'), (4,'in parts','equal parts')])
def test_a_size_that_processes_round_up_is_named_and_gives_no_warning(micro_bs, split_words, parts):
    "The batches of 8 samples stay whole, or are split into micro-batches of 4"
    def warnings_of(accum_bs):
        plan = Plan([LoaderSizes(8, 64, micro_bs)]*2, accum_bs, split_words=split_words)
        with collect_warnings() as collected: plan.check()
        return [str(o.message) for o in collected]
    message, = warnings_of(65)
    rounded = int(message.split('pass `accum_bs=')[1].split('`')[0])
    assert rounded>65 and not warnings_of(rounded) and parts in message

def test_a_schedule_too_large_for_an_epoch_is_told_to_lower_its_sizes():
    with pytest.raises(ValueError, match='Lower the sizes of the schedule'):
        toy(4, n=16).fit(2, cbs=GradientAccumulationSchedule(32, 64, drop_last=True))

# A loss that needs the whole step, or cannot be checked in the fit

class HasMovingAverage(Module):
    "A loss that subtracts a moving average of the predictions, as DINO does"
    def __init__(self): self.mean = 0.
    def forward(self, p, y):
        self.mean = 0.9*self.mean+0.1*p.detach().mean(0)
        return F.cross_entropy(p-self.mean, y)

@pytest.mark.parametrize('make_loss,key', [(HasMovingAverage,'loss-with-state'), (lambda: nt_xent,'loss-not-a-mean')])
def test_a_cache_instead_of_accumulation_gives_the_run_of_a_loss_that_needs_the_whole_step(make_loss, key):
    message, = messages_of(toy(4, n=64, loss_func=make_loss()), GradientAccumulation(16))
    remedy = 'replace `GradientAccumulation` with `fastaccum.GradientCache(micro_batch_size=4)`'
    assert key in message and remedy in message
    full,cached = [toy(16, n=64, loss_func=make_loss()) for _ in range(2)]
    full.fit(1, 1e-3)
    assert not messages_of(cached, GradientCache(micro_batch_size=4))
    assert_same_run(full, cached)

def test_a_loss_that_is_no_sum_although_it_says_so_is_told_what_a_sum_has_to_be():
    class Pairs(Module):
        reduction = 'sum'
        def forward(self, p, y): return F.cross_entropy(p, y, reduction='sum')+p.mean(0).pow(2).sum()
    message, = messages_of(toy(4, n=64, loss_func=Pairs()), GradientAccumulation(16))
    assert 'each of its terms must be a sum over samples' in message and 'n_items' not in message

def test_the_check_that_a_warning_names_sees_the_callbacks_of_the_fit():
    def adds_noise(learn):
        if learn.training: learn.loss_grad = learn.loss_grad+learn.pred.pow(2).sum()+torch.rand(())
    # a fit cannot try a callback that draws random numbers
    def penalty(): return CallAt('after_loss', adds_noise)
    learn,acc = toy(4, n=64),GradientAccumulation(16)
    message, = messages_of(learn, [acc,penalty()])
    assert '#loss-not-tried' in message and 'call `learn.accum_check(cbs=…)` with the callbacks' in message
    assert not toy(4, n=64).accum_check(cbs=[acc,penalty()]).ok

# Callbacks that run the model again

class SharpnessAware(Callback):
    "Replaces the gradients of a step with those at weights that were moved along them, as SAM does"
    def before_step(self):
        params = list(self.model.parameters())
        moves = [0.05*p.grad for p in params]
        def move(by): torch._foreach_add_([p.data for p in params], moves, alpha=by)
        move(1)
        self.opt.zero_grad()
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        move(-1)

class PassesTwice(Callback):
    "Adds the gradients of a second loss to those of each batch"
    def after_backward(self):
        if self.training: (0.1*self.model(*self.xb).pow(2).mean()).backward()

@pytest.mark.parametrize('cls,key', [(SharpnessAware,'second-pass'), (PassesTwice,'gradients-changed')])
def test_a_cache_instead_of_accumulation_gives_the_run_of_a_callback_with_a_second_pass(cls, key):
    message, = messages_of(toy(4, n=64), [GradientAccumulation(16),cls()])
    remedy = 'replace `GradientAccumulation` with `fastaccum.GradientCache(micro_batch_size=4)`'
    assert key in message and remedy in message
    full,cached = [toy(16, n=64) for _ in range(2)]
    full.fit(1, 0.1, cbs=cls())
    assert not messages_of(cached, [GradientCache(micro_batch_size=4),cls()], lr=0.1)
    assert_same_run(full, cached)

@pytest.mark.parametrize('acc', [GradientAccumulation(4), GradientAccumulation(16, micro_batch_size=4)], ids=repr)
def test_a_second_pass_on_whole_batches_gives_no_warning(acc):
    bs = acc.accum_bs
    full,learn = [toy(bs, n=64) for _ in range(2)]
    full.fit(1, 0.1, cbs=SharpnessAware())
    assert not messages_of(learn, [acc,SharpnessAware()], lr=0.1)
    assert_same_run(full, learn)

def test_the_watch_for_a_second_pass_leaves_nothing_in_the_model_and_its_copies():
    "A scripted model accepts no hooks"
    copied = []
    scripted,learn = [toy(4, n=64) for _ in range(2)]
    scripted.model = torch.jit.script(scripted.model)
    for o in (scripted,learn):
        message, = messages_of(o, [GradientAccumulation(16),SharpnessAware()])
        assert 'second-pass' in message
    messages_of(learn, [GradientAccumulation(16),CallAt('after_step', lambda l: copied.append(deepcopy(l.model)))])
    assert not any(m._forward_pre_hooks for copy in copied for m in copy.modules())

def test_a_callback_that_validates_after_a_step_gives_no_warning():
    def validate(learn):
        if learn.training: learn.validate()
    def predict(learn):
        with torch.no_grad(): learn.model(*learn.xb)
    cbs = [GradientAccumulation(16),CallAt('after_step', validate),CallAt('before_step', predict)]
    assert not messages_of(toy(4, n=64), cbs)

# Loaders

def test_a_loader_without_a_batch_size_gets_the_attribute_that_works():
    "A fastai DataLoader would join batches if `bs` were set"
    def joined(b): return tuple(map(torch.stack, zip(*b)))
    for loader in (DataLoader(in_chunks(list(toy_data(64)), 4), bs=None, create_batch=joined),
        BatchListLoader(toy_data(64), [in_chunks(list(range(64)), 4)])):
        learn = toy(4, n=64)
        learn.dls = DataLoaders(loader, loader)
        with pytest.raises(ValueError, match=r'set `learn.dls.train.(\w+) = 16`') as e:
            learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
        name = 'batch_size' if 'train.batch_size' in str(e.value) else 'bs'
        setattr(learn.dls.train, name, 4)
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
        assert learn.train_iter==4 and len(learn.recorder.losses)==4

class Doubled(BatchListLoader):
    "A loader of batches with two rows for each item"
    bs = 4
    def __iter__(self): return ((torch.cat([x,x]),torch.cat([y,y])) for x,y in super().__iter__())

def test_larger_batches_than_the_loader_says_are_cured_by_what_the_warning_says():
    learn = toy(4, n=64)
    learn.dls.loaders[0] = Doubled(toy_data(64), [in_chunks(list(range(64)), 4)])
    message, = messages_of(learn, GradientAccumulation(16))
    assert 'Set `learn.dls.train.bs = 8`' in message
    learn.dls.train.bs = 8
    assert not messages_of(learn, GradientAccumulation(16))
    def twice(b): return torch.cat([b[0],b[0]]),torch.cat([b[1],b[1]])
    learn.dls.loaders[0] = DataLoader(toy_data(64), bs=4, after_batch=twice)
    message, = messages_of(learn, GradientAccumulation(16))
    assert 'train.bs' not in message and 'in `before_batch`' in message

def test_a_loader_of_ready_made_batches_is_not_told_to_change_its_size_in_recalibration():
    def model():
        limited = LimitedMemory(runs_out_above(4, 'validation'))
        return nn.Sequential(nn.Linear(5, 6), limited, nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    learn = toy(8, n=64, model=model, splitter=all_params)
    with pytest.raises(torch.OutOfMemoryError, match='pass a smaller `bs`, such as `bs=8`'): learn.recalibrate_bn(16)
    learn.dls.loaders[0] = TorchDataLoader(in_chunks(list(range(64)), 8), batch_size=None,
        collate_fn=lambda rows: toy_data(64)[rows])
    with pytest.raises(torch.OutOfMemoryError, match='create the DataLoaders with smaller batches'):
        learn.recalibrate_bn()

# Memory and precision

def test_auto_is_not_advised_to_a_callback_that_has_it():
    def fails(learn):
        if learn.training: raise torch.OutOfMemoryError('planted')
    with pytest.raises(torch.OutOfMemoryError, match='planted\n.*is not split: use a smaller `bs`') as e:
        toy(8).fit(1, cbs=[GradientAccumulation(16, micro_batch_size='auto'),CallAt('before_batch', fails)])
    assert "'auto'" not in str(e.value)

def test_a_search_that_began_too_high_names_the_size_to_begin_with():
    def model(): return nn.Sequential(nn.Linear(5, 3), LimitedMemory(runs_out_above(8, 'forward'))).double()
    def learn(): return toy(4, n=120, model=model, splitter=all_params)
    with pytest.raises(torch.OutOfMemoryError, match=r'not even a batch of 32 samples.*bs_find\(init_val=16\)'):
        learn().bs_find(init_val=64, max_trials=2, show_plot=False)
    assert learn().bs_find(init_val=16, max_trials=3, show_plot=False).size==8

def test_half_precision_without_master_gradients_is_replaced_as_the_error_says():
    learn = toy(4).to_non_native_fp16()
    with pytest.raises(ValueError, match=r'learn.to_non_native_fp32\(\).to_fp16\(\)'):
        learn.fit(1, cbs=GradientAccumulation(8))
    learn.to_non_native_fp32().to_fp16()
    assert [type(o).__name__ for o in learn.cbs if 'Precision' in type(o).__name__]==['MixedPrecision']
