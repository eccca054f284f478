"A fit prints what its steps are, and refuses or warns of mistakes of new users, with the remedy."
import fastaccum, fresh, pytest, random, warnings
from inspect import signature
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.vision.all import (BCEWithLogitsLossFlat, Callback, CrossEntropyLossFlat, CutMix, DataLoader, DataLoaders,
    GradientAccumulation as FastaiGradientAccumulation, Learner, MixUp, ProgressCallback, nn, set_seed, torch)
from fastaccum import (FreezeBN, GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler,
    GradientCache, ScaledLR)
from fastaccum.base import messages
from fastaccum.base.messages import WarnOnce
from fastaccum.testing import assert_same_run, both_runs, deviation, one_cycle, toy, toy_data
from common import CallAt, LimitedMemory, runs_out_above
from small_learners import all_params
from test_warned import count_warnings, fit_small_rate, summed

x = torch.randn(70, 5, generator=torch.Generator().manual_seed(0))
data = list(zip(x, (x[:,0]>0).long()))

def learner(bs=4, drop_last=False, n=70, **kwargs):
    "Return a Learner on `n` samples that prints a table of losses, as fastai's does by default"
    dls = DataLoaders(DataLoader(data[:n], bs=bs, drop_last=drop_last), DataLoader(data, bs=32))
    return Learner(dls, nn.Linear(5, 2), CrossEntropyLossFlat(), **kwargs)

def announced(capsys):
    "Return the lines that fastaccum has printed, and the output after the last of these lines"
    head,*rest = capsys.readouterr().out.split('GradientAccumulation')
    lines = [f'GradientAccumulation{o}'.partition('\n')[0] for o in rest]
    return lines,rest[-1].partition('\n')[2] if rest else head

schedule,scheduler = GradientAccumulationSchedule,GradientAccumulationScheduler
# Each case: a function that makes a callback, arguments of `learner`, and the line that the fit prints
printed_lines = [
    (lambda: GradientAccumulation(16), {}, 'GradientAccumulation: 16 samples per step (4 micro-batches of 4), '
        '5 steps per epoch, the last with 6 samples'),
    (lambda: GradientAccumulation(14), {}, 'GradientAccumulation: 16 samples per step '
        '(14 rounded up to 4 micro-batches of 4), 5 steps per epoch, the last with 6 samples'),
    (lambda: GradientAccumulation(16), dict(drop_last=True), 'GradientAccumulation: 16 samples per step '
        '(4 micro-batches of 4), 4 steps per epoch, 6 of 70 samples left out of each epoch'),
    (lambda: GradientAccumulation(n_batches=2), {}, 'GradientAccumulation: 8 samples per step (2 micro-batches of 4), '
        '9 steps per epoch, the last with 6 samples'),
    (lambda: GradientAccumulation(35, micro_batch_size='auto'), dict(bs=35), 'GradientAccumulation: 35 '
        'samples per step (1 batch of 35, split where memory runs out), 2 steps per epoch'),
    (lambda: GradientAccumulation(14, micro_batch_size=4), dict(bs=10), 'GradientAccumulation: 14 samples per step '
        '(micro-batches of at most 4), 5 steps per epoch'),
    (lambda: schedule(4, 16, finish=1.), {}, 'GradientAccumulationSchedule: 4 to 16 samples per step '
        '(1 to 4 micro-batches of 4), 20 steps in 2 epochs, changing from 0% to 100% of training'),
    (lambda: schedule(4, 16, finish=1), {}, 'GradientAccumulationSchedule: 4 to 16 samples per step '
        '(1 to 4 micro-batches of 4), 15 steps in 2 epochs, changing from 0% to 50% of training'),
    (lambda: scheduler({0:4, 1:2}), dict(drop_last=True), 'GradientAccumulationScheduler: 16 to 8 samples per step '
        '(4 to 2 micro-batches of 4), 12 steps in 2 epochs, 6 of 70 samples left out of each epoch')]

@pytest.mark.parametrize('make,kwargs,line', printed_lines)
def test_a_line_above_the_table_describes_the_steps_in_the_words_of_the_plan(make, kwargs, line, capsys):
    learn,acc = learner(**kwargs),make()
    learn.fit(2, cbs=acc)
    lines,table = announced(capsys)
    assert lines==[line] and 'train_loss' in table
    plan = acc.plan(learn, 2)
    assert repr(plan).startswith(line.partition(': ')[2]) and sum(plan.steps)==len(learn.recorder.losses)

def test_the_line_is_printed_above_a_table_only_once_per_plan_and_not_with_verbose_false(capsys):
    learn,acc = learner(cbs=GradientAccumulation(16)),GradientAccumulation
    learn.fit_one_cycle(3)
    assert len(announced(capsys)[0])==1
    with learn.no_logging(): learn.fit(1)
    with learn.no_bar(): learn.fit(1)
    learn.validate()
    learn.get_preds()
    learn.lr_find(show_plot=False)
    learn.accum_check()
    assert announced(capsys)[0]==[]
    learn.remove_cb(acc)
    for quiet in (acc(16, verbose=False), schedule(8, 16, verbose=False), scheduler({0:2}, verbose=False)):
        learn.fit(1, cbs=quiet)
        learn.remove_cb(acc)
    assert announced(capsys)[0]==[]

def test_a_plan_that_changes_in_a_fit_is_printed_again(capsys):
    learn = learner(cbs=GradientAccumulation(16))
    grow = CallAt('before_epoch', lambda l: setattr(l.gradient_accumulation, 'accum_bs', 16 if l.epoch<2 else 32))
    learn.fit(4, cbs=grow)
    assert [o[:41] for o in announced(capsys)[0]]==[f'GradientAccumulation: {n} samples per step' for n in (16,32)]

@pytest.mark.parametrize('acc,words', [(GradientAccumulation(48), '48 samples per step'),
    (GradientAccumulation(), '32 samples per step'), (GradientAccumulation(n_batches=4), '4 micro-batches per step'),
    (GradientAccumulation(8, micro_batch_size=4), '8 samples per step (micro-batches of at most 4)'),
    (GradientAccumulation(8, micro_batch_size='auto'), '8 samples per step, split where memory runs out'),
    (schedule(8, 32), '8 to 32 samples per step'), (scheduler({0:2, 3:8}), '2 to 8 micro-batches per step')])
def test_the_repr_of_a_callback_has_the_size_of_a_step(acc, words): assert repr(acc)==f'{type(acc).__name__}: {words}'

# Step sizes in batches instead of samples

@pytest.mark.parametrize('seed', range(6))
def test_with_n_batches_a_step_has_that_many_micro_batches(seed):
    r = random.Random(seed)
    micro,n_batches,n = r.randint(1, 9),r.randint(1, 6),r.randint(30, 90)
    a,_ = both_runs(micro, micro*n_batches, n=n)
    b,c = toy(micro, n=n),toy(micro*2, n=n)
    one_cycle(b, [GradientAccumulation(n_batches=n_batches)])
    assert_same_run(a, b)
    # batches of the loader are split
    acc = GradientAccumulation(n_batches=n_batches, micro_batch_size=micro)
    assert acc.accum_bs is None
    one_cycle(c, [acc])
    assert acc.accum_bs==micro*n_batches
    assert_same_run(a, c)

def test_n_batches_follows_the_loader_until_accum_bs_is_set():
    acc = GradientAccumulation(n_batches=3)
    for bs in (4,10):
        learn = toy(bs, cbs=acc)
        assert acc.accum_bs==3*bs or acc.loop is not None
        learn.fit(1)
        assert acc.accum_bs==3*bs and len(learn.recorder.losses)==-(-70//(3*bs))
        learn.remove_cb(acc)
    acc.accum_bs = 20
    assert acc.n_batches is None and acc.plan(learn).sizes==[[20,20,20,10]]

@pytest.mark.parametrize('kwargs', [dict(accum_bs=64), dict(n_acc=64)])
def test_samples_and_batches_together_are_refused(kwargs):
    nm, = kwargs
    with pytest.raises(ValueError, match=f'`{nm}=64`.*`n_batches=4`.*pass one') as e:
        GradientAccumulation(n_batches=4, **kwargs)
    assert '#two-sizes' in str(e.value)
    for bad in (0, 4., '4', True):
        with pytest.raises((ValueError,TypeError), match='`n_batches` must be'): GradientAccumulation(n_batches=bad)
    # `n_batches` must be named
    with pytest.raises(TypeError): GradientAccumulation(64, True, None, None, None, 4)

@pytest.mark.parametrize('nm', ['accum_bs','n_acc'])
def test_a_step_smaller_than_a_batch_says_that_samples_are_counted_and_how_to_count_batches(nm):
    with pytest.warns(UserWarning, match='larger than') as told: toy(16).fit(1, 0.1, cbs=GradientAccumulation(**{nm:4}))
    for o in (f'`{nm}` counts samples, not batches', f'for steps of 4 batches of 16, pass `{nm}=64` or `n_batches=4`'):
        assert o in str(told[0].message)
    for remedy in ({nm:64}, dict(n_batches=4)): assert GradientAccumulation(**remedy).plan(toy(16)).sizes==[[64,6]]

# Samples that are left out, and steps larger than an epoch

left_out,no_step = {('','samples-left-out'):1},{('','no-step'):1}

@pytest.mark.parametrize('accum_bs,acc,expected', [(48,{},left_out), (48,dict(drop_last=False),{}),
    (48,dict(drop_last=True),{}), (60,{},left_out), (64,{},{}), (16,{},{}), (4,{},{})])
def test_a_fit_that_leaves_out_a_tenth_of_the_samples_warns(accum_bs, acc, expected):
    learn = learner(drop_last=True)   # the loader itself leaves out 2 of 70 samples
    with learn.no_bar(), learn.no_logging():
        warned = count_warnings(lambda: learn.fit(2, cbs=GradientAccumulation(accum_bs, **acc)))
    assert warned==expected

def test_samples_that_a_schedule_leaves_out_are_counted_over_all_epochs():
    for sizes,expected in (((16,48),left_out), ((8,16),{})):
        learn = learner(drop_last=True)
        with learn.no_bar(), learn.no_logging():
            assert count_warnings(lambda: learn.fit(3, cbs=schedule(*sizes)))==expected

@pytest.mark.parametrize('n,n_left_out,which', [(70,22,'20 of them'), (68,20,'them')])
def test_the_warning_of_samples_left_out_has_the_right_numbers_and_remedy(n, n_left_out, which):
    "The loader with 70 samples in batches of 4 drops two of them, which the callback never sees"
    learn = learner(n=n, drop_last=True)
    message = fr'^{n_left_out} of {n} samples are left out of each epoch.* train on {which}, pass `drop_last=False`'
    with pytest.warns(UserWarning, match=message): learn.fit(1, cbs=GradientAccumulation(48))
    assert GradientAccumulation(48, drop_last=False).plan(learn).sizes==[[48,20]]

@pytest.mark.parametrize('loader_drops', [False,True])
def test_a_step_larger_than_the_epoch_is_warned_of(loader_drops):
    for drop_last,expected in ((None,no_step), (False,{})):
        learn = learner(drop_last=loader_drops)
        with learn.no_bar(), learn.no_logging():
            fit = lambda: learn.fit(1, cbs=GradientAccumulation(5000, drop_last=drop_last))
            assert count_warnings(fit)==expected
        assert len(learn.recorder.losses)==1

# fastai's class of the same name, used by accident

# `sorted_imports` has the order that a sorter of imports makes: fastai's star import then replaces
# fastaccum's class
sorted_imports = "from fastaccum import GradientAccumulation\nfrom fastai.vision.all import *\n"
right_imports = "from fastai.vision.all import *\nfrom fastaccum import GradientAccumulation\n"
fits = """
import warnings
from fastaccum.testing import toy
def messages_of_fits(*cbs):
    with warnings.catch_warnings(record=True) as collected:
        warnings.simplefilter('always')
        exec('import warnings\\n'+{before!r})
        for cb in cbs: toy(4).fit(1, 0.1, cbs=cb)
    return [str(o.message) for o in collected if '\\nMore: ' in str(o.message)]
print(messages_of_fits({cb}, {cb}))
"""
by_name = 'import fastaccum\n'+sorted_imports.partition('\n')[2]
silenced = "import fastaccum; warnings.filterwarnings('ignore', category=fastaccum.ImportOrderWarning)"

@pytest.mark.parametrize('imports,cb,before,n', [(sorted_imports, 'GradientAccumulation(8)', '', 1),
    (right_imports, 'GradientAccumulation(8)', '', 0), (by_name, 'fastaccum.GradientAccumulation(8)', '', 0),
    (sorted_imports, 'GradientAccumulation(8)', silenced, 0), (sorted_imports, 'GradientClip(1.)', '', 0),
    (sorted_imports, 'type("Own", (GradientAccumulation,), {})(8)', '', 0)])
def test_a_fit_with_fastais_class_warns_once_per_process(imports, cb, before, n):
    code = imports+fits.format(cb=cb, before=before)
    messages = eval(fresh.run(code, quiet=True).stdout)
    assert len(messages)==n
    for o in ("fastai's `GradientAccumulation`", 'full-batch run', 'import sorter',
        '`import fastaccum` and `fastaccum.GradientAccumulation(…)`', '#import-order'):
        assert all(o in m for m in messages)

def test_importing_fastaccum_does_not_change_the_runs_of_fastais_class():
    method = FastaiGradientAccumulation._orig_before_fit
    runs = [toy(4),toy(4)]
    runs[0].fit(2, 0.1, cbs=FastaiGradientAccumulation(8))
    runs[1].fit(2, 0.1, cbs=type('Stock', (FastaiGradientAccumulation,), dict(before_fit=method))(8))
    assert_same_run(*runs)

# Arguments in the wrong place

layer = nn.Linear(2, 2)
misplaced_arguments = [(lambda: GradientAccumulation(64, 32), '`micro_batch_size=32`'),
    (lambda: GradientAccumulation(64, 'auto'), "`micro_batch_size='auto'`"),
    (lambda: GradientCache(16), r'`GradientCache\(micro_batch_size=16\)`'),
    (lambda: GradientCache('auto'), r"`GradientCache\(micro_batch_size='auto'\)`"),
    (lambda: ScaledLR(64), r'`ScaledLR\(base_bs=64\)`'),
    (lambda: FreezeBN(layer), r'`fastaccum\.FreezeBN\(lambda m: m\[0\]\)`'),
    (lambda: GradientAccumulation(8).plan(5), r'needs a Learner.*got 5.*`plan\(learn, 5\)`'),
    (lambda: GradientAccumulation(8).plan(None), 'needs a Learner.*got None')]

@pytest.mark.parametrize('f,words', misplaced_arguments)
def test_an_argument_in_the_wrong_place_is_refused_with_what_was_meant(f, words):
    with pytest.raises(TypeError, match=words) as e: f()
    assert '\nMore: https://' in str(e.value)

def test_a_plan_takes_a_learner_its_loaders_or_a_loader():
    learn,acc = toy(4),GradientAccumulation(16)
    assert acc.plan(learn).sizes==acc.plan(learn.dls).sizes==acc.plan(learn.dls.train).sizes==[[16]*4+[6]]
    assert acc.plan(learn, 3).steps==[5]*3

# Two callbacks

def refusal(learn, cbs):
    "Return the message of the error with which a fit refuses several callbacks that accumulate"
    with pytest.raises(ValueError, match='callbacks accumulate') as e: learn.fit(1, 0.1, cbs=cbs)
    return str(e.value)

def test_the_error_for_two_callbacks_says_whose_they_are_and_how_to_remove_them():
    acc = GradientAccumulation
    assert refusal(toy(4), [acc(8),acc(16)]).count("fastaccum's GradientAccumulation")==2
    learn = toy(4, cbs=acc(8))
    text = refusal(learn, FastaiGradientAccumulation(16))
    assert "fastaccum's GradientAccumulation and fastai's GradientAccumulation" in text
    refusal(toy(4, cbs=acc(8)), acc)   # fastai also takes a class and creates the callback itself
    remedy, = [o for o in text.split('`') if o.startswith('learn.')]
    eval(remedy)
    learn.fit(1, 0.1, cbs=acc(16))
    assert len(learn.recorder.lrs)==5   # steps of 16 of the 70 samples

def test_two_callbacks_of_both_kinds_are_not_also_warned_of(monkeypatch):
    "The warning of fastai's class says that the fit uses fastai's, and not fastaccum's"
    monkeypatch.setattr(messages, 'warn_once', WarnOnce())   # otherwise, a process warns only once
    learn,fastais = toy(4, cbs=GradientAccumulation(8)),FastaiGradientAccumulation(16)
    assert not count_warnings(lambda: refusal(learn, fastais))

# Memory that runs out with a fixed size of micro-batches

def with_limited_memory(cap):
    return nn.Sequential(nn.Linear(5, 3), LimitedMemory(runs_out_above(cap, 'backward'))).double()

@pytest.mark.parametrize('bs,cbs,smaller', [(16,[GradientAccumulation(16)],'`bs`'),
    (16,[GradientAccumulation(16, micro_batch_size=8)],'`micro_batch_size`'),
    (8,[GradientAccumulationScheduler({0:2})],'`bs`')])
def test_an_out_of_memory_error_names_the_size_to_lower_and_auto_which_then_works(bs, cbs, smaller):
    learn = toy(bs, model=lambda: with_limited_memory(5), splitter=all_params)
    remedies = f"planted.*\n.*`micro_batch_size='auto'`.* a smaller {smaller}"
    with pytest.raises(torch.OutOfMemoryError, match=remedies) as e: learn.fit(1, cbs=cbs)
    assert '#fixed-size-does-not-fit' in str(e.value)
    with pytest.warns(UserWarning, match='memory ran out'):
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))

class LimitedInValidation(nn.Linear):
    "A layer for which memory runs out above 8 samples, but only in validation"
    def forward(self, x):
        if not self.training and len(x)>8: raise torch.OutOfMemoryError('planted')
        return super().forward(x)

def test_an_out_of_memory_error_in_validation_names_val_bs_and_auto_which_then_works():
    learn = toy(16, model=lambda: LimitedInValidation(5, 3).double(), splitter=all_params)
    with pytest.raises(torch.OutOfMemoryError, match="planted\n.*`val_bs`.*`micro_batch_size='auto'`") as e:
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size=8))
    assert '#fixed-size-does-not-fit' in str(e.value)
    assert 'one_batch' not in vars(learn)
    with pytest.warns(UserWarning, match='memory ran out'):
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))

@pytest.mark.parametrize('in_a_step', [False,True])
def test_with_auto_validation_and_predictions_outside_of_a_fit_are_split_as_well(in_a_step):
    def results(layer, cbs):
        learn = toy(16, model=lambda: layer(5, 3).double(), splitter=all_params, cbs=cbs)
        res = []
        def run(learn): res.append([learn.validate(),learn.get_preds(),learn.get_preds(with_loss=True)])
        if not in_a_step: run(learn)
        else: learn.fit(1, 0., cbs=CallAt('before_step', run))
        return res[0]
    with pytest.warns(UserWarning, match='memory ran out'):
        split = results(LimitedInValidation, GradientAccumulation(32, micro_batch_size='auto'))
    assert deviation(split, results(nn.Linear, []))<1e-12

class OneNumber(nn.Module):
    "Cross-entropy as a tensor with one element"
    def forward(self, p, y): return F.cross_entropy(p, y)[None]

@pytest.mark.parametrize('loss_func,tokens', [(OneNumber(),False), (CrossEntropyLossFlat(),True),
    (BCEWithLogitsLossFlat(),False)], ids=['one_number','of_tokens','of_labels'])
def test_the_losses_of_a_validation_batch_that_is_split_are_those_of_the_whole_batch(loss_func, tokens):
    "Losses that are not reduced have an element for each sample, token or label"
    def results(layer):
        data = toy_data(70, tokens)
        if isinstance(loss_func, BCEWithLogitsLossFlat):
            data = TensorDataset(data.tensors[0], F.one_hot(data.tensors[1], 3).double())
        learn = toy(16, data=data, model=lambda: layer(5, 3).double(), splitter=all_params, loss_func=loss_func,
            cbs=GradientAccumulation(32, micro_batch_size='auto'))
        return [learn.validate(),learn.get_preds(with_loss=not isinstance(loss_func, OneNumber))]
    with pytest.warns(UserWarning, match='memory ran out'): split = results(LimitedInValidation)
    assert deviation(split, results(nn.Linear))<1e-6

def test_an_out_of_memory_error_with_a_cache_names_auto_for_the_cache():
    learn = toy(8, model=lambda: with_limited_memory(3), splitter=all_params)
    cbs = [GradientAccumulation(16),GradientCache(micro_batch_size=4)]
    remedies = "Pass `micro_batch_size='auto'` to GradientCache.*or use a smaller `micro_batch_size`"
    with pytest.raises(torch.OutOfMemoryError, match=remedies):
        learn.fit(1, cbs=cbs)

# A loss that is a sum but has no `reduction='sum'`

def test_a_sum_without_reduction_sum_is_warned_of_and_the_remedy_is_right():
    with pytest.warns(UserWarning, match="parts add up to it.*`learn.loss_func.reduction = 'sum'`"):
        both_runs(n=64, loss_func=summed, fit=fit_small_rate)
    def declared_sum(p, y): return summed(p, y)
    declared_sum.reduction = 'sum'
    runs = []
    assert not count_warnings(lambda: runs.extend(both_runs(n=64, loss_func=declared_sum, fit=fit_small_rate)))
    assert_same_run(*runs)

def test_a_loss_that_is_neither_mean_nor_sum_is_not_called_a_sum():
    def root(p, y): return F.cross_entropy(p, y).sqrt()
    with pytest.warns(UserWarning, match='not a mean over samples') as told: both_runs(n=64, loss_func=root)
    assert not [o for o in told if "= 'sum'" in str(o.message)]

# MixUp and CutMix

def images(bs, cbs):
    "Return a Learner on 16 small images"
    set_seed(0)
    ds = [(torch.rand(1, 6, 6), i%3) for i in range(16)]
    dls = DataLoaders(DataLoader(ds, bs=bs), DataLoader(ds, bs=16))
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    return Learner(dls, model, CrossEntropyLossFlat(), cbs=cbs)

@pytest.mark.parametrize('mixer', [MixUp,CutMix])
def test_mixing_within_micro_batches_is_warned_of_and_the_remedy_is_right(mixer):
    def losses(bs, *cbs):
        learn = images(bs, [mixer(),*cbs])
        with learn.no_bar(), learn.no_logging():
            warned = count_warnings(lambda: (set_seed(1),learn.fit(2, 0.1)))
        return warned,[o.item() for o in learn.recorder.losses]
    _,full_batch = losses(8)
    warned,different = losses(4, GradientAccumulation(8))
    assert warned=={('AccumulationWarning','mixed-in-micro-batches'):1} and different!=pytest.approx(full_batch)
    warned,same = losses(8, GradientAccumulation(8, micro_batch_size=4))
    assert not warned and same==pytest.approx(full_batch)
    assert not losses(8, GradientAccumulation(8))[0]   # no warning if each step is one batch

# What is known before the first batch is said before the progress bar

class NotesWarnings(Callback):
    "Notes the entries of the warnings that came before the progress bar of the epoch"
    order = ProgressCallback.order-1
    def before_train(self): self.before_bar = [str(o.message).partition('.html#')[2] for o in self.told]

@pytest.mark.parametrize('accum,kwargs', [(16,{}),(32,dict(micro_batch_size=4))])
def test_warnings_come_before_the_progress_bar_where_they_can(accum, kwargs):
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    dls = DataLoaders(DataLoader(data, bs=8), DataLoader(data, bs=32))
    learn,notes = Learner(dls, model, CrossEntropyLossFlat(), cbs=MixUp()),NotesWarnings()
    with warnings.catch_warnings(record=True) as notes.told:
        warnings.simplefilter('always')
        learn.fit(1, cbs=[GradientAccumulation(accum, **kwargs),notes])
    assert {*notes.before_bar}=={'batchnorm','mixed-in-micro-batches'}
    assert len(notes.told)==2

def test_help_describes_each_argument_of_the_callbacks():
    classes = [getattr(fastaccum, o) for o in fastaccum.__all__]
    for cls in (o for o in classes if isinstance(o, type) and issubclass(o, Callback) and '__init__' in vars(o)):
        described = {o.partition(':')[0] for o in (cls.__init__.__doc__ or '').splitlines()}
        assert {*signature(cls).parameters}<=described, cls
