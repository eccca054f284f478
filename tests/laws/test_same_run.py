"A run on micro-batches is the full-batch run in fits of all kinds."
import pickle, pytest, sweep, torch
from functools import partial
from torch import nn
from torch.utils.data import TensorDataset
from fastai.vision.all import (Adam, DataLoader, DataLoaders, EarlyStoppingCallback, FetchPredsCallback,
    GradientAccumulation as FastaiGradientAccumulation, OptimWrapper, ReduceLROnPlateau, SGD, SaveModelCallback,
    ShortEpochCallback, load_learner, params)
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_same_run, deviation, toy, toy_data, both_runs
from common import RecordAt, grads, pick_cases, weights
from small_learners import all_params, random_ints

@pytest.mark.parametrize('seed', pick_cases(35, range(400)))
def test_random_runs_are_full_batch_runs(seed): sweep.check(seed)

@pytest.mark.parametrize('args,full', [(dict(),32), (dict(n_acc=16),16), (dict(accum_bs=10),12)], ids=str)
def test_the_arguments_of_fastais_callback_are_accepted(args, full):
    a,b = toy(full),toy(4)
    a.fit_one_cycle(2, 0.05)
    b.fit_one_cycle(2, 0.05, cbs=GradientAccumulation(**args))
    assert_same_run(a, b)

class MeanEmbedding(nn.Embedding):
    "Returns the mean of the embeddings of a sample's tokens"
    def forward(self, x): return super().forward(x).mean(1)

@pytest.mark.parametrize('acc', [dict(),dict(micro_batch_size=2)], ids=str)
@pytest.mark.parametrize('opt', [torch.optim.SparseAdam,torch.optim.SGD])
def test_a_run_with_sparse_gradients_is_the_full_batch_run(opt, acc):
    "A step changes only those rows of an embedding that its samples use"
    data = TensorDataset(random_ints(200, 70, 4), random_ints(3, 70))
    def model(): return MeanEmbedding(200, 3, sparse=True).double()
    assert_same_run(*both_runs(data=data, model=model, splitter=all_params,
        opt_func=partial(OptimWrapper, opt=opt), acc=acc))

def as_a_wrapper(learn):
    learn.create_opt()   # the splitter of `toy` needs the model itself
    learn.model = torch.compile(learn.model, backend='aot_eager')
def in_place(learn): learn.model.compile(backend='aot_eager')

@pytest.mark.parametrize('acc', [dict(),dict(micro_batch_size=4)], ids=str)
@pytest.mark.parametrize('compile_model', [as_a_wrapper,in_place])
def test_the_run_of_a_compiled_model_is_the_full_batch_run(compile_model, acc):
    "The backend `aot_eager` compiles the forward and the backward pass, but needs no compiler of C++"
    def fit(learn, cbs):
        compile_model(learn)
        learn.fit_one_cycle(2, 0.05, cbs=cbs)
    assert_same_run(*both_runs(fit=fit, acc=acc))

# Fit after fit

@pytest.mark.parametrize('opt_func', [Adam,partial(OptimWrapper, opt=torch.optim.SGD)], ids=['fastai','torch'])
def test_several_fits_with_one_callback_are_full_batch_runs(opt_func):
    "In the second fit, the body is frozen, but fastai's optimizers still decay it, in both runs"
    def fit(l, cbs):
        for freeze,how in ((l.unfreeze,l.fit_one_cycle),(l.freeze,l.fit),(l.unfreeze,l.fit_flat_cos)):
            freeze()
            how(1, slice(1e-3, 1e-2), wd=0.1, cbs=cbs)
    assert_same_run(*both_runs(opt_func=opt_func, fit=fit))

def test_gradients_that_an_earlier_fit_left_are_not_used():
    """fastai's callback leaves gradients when a fit ends

    A body that is frozen afterwards must not change.
    """
    # SGD without momentum has no state
    learn,fresh = toy(4, n=60, opt_func=SGD),toy(16, n=60, opt_func=SGD)
    learn.fit(1, 0.1, cbs=FastaiGradientAccumulation(16))
    fresh.model.load_state_dict(learn.model.state_dict())
    fresh.fit(1, 0.1)
    learn.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert deviation((weights(fresh),fresh.recorder.losses), (weights(learn),learn.recorder.losses))<1e-6
    learn = toy(4, n=60, opt_func=Adam)
    learn.fit(1, 0.1, cbs=FastaiGradientAccumulation(16))
    learn.freeze()
    body = learn.model[0].weight.clone()
    learn.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert learn.model[0].weight.equal(body)

@pytest.mark.parametrize('acc,num_it,lrs', [(dict(),30,{}), (dict(drop_last=True),12,{}),
    (dict(log_accum_batch=False),30,{}), (dict(),60,dict(end_lr=1e5, stop_div=True))], ids=str)
def test_lr_find_has_a_point_for_each_step(acc, num_it, lrs):
    "A fit after the search is the full-batch run"
    def fit(l, cbs):
        l.add_cbs(cbs)
        l.found = l.lr_find(num_it=num_it, show_plot=False, **dict(dict(stop_div=False), **lrs)).valley,l.recorder.lrs
        l.points = list(l.recorder.losses)
        if 'log_accum_batch' not in acc: l.fit_one_cycle(1, 0.05)
    a,b = both_runs(fit=fit, acc=acc)
    assert (len(b.found[1])==num_it)==(not lrs) and deviation(a.found, b.found)<1e-9
    assert deviation(a.points, b.points)<1e-6
    assert_same_run(a, b)

# Other callbacks

def within(f):
    "Return callbacks that call `f(learn)` once, after the first epoch"
    todo = [f]
    return [RecordAt('after_epoch', lambda l: todo and todo.pop()(l), order=70)]
def run_lr_find(l): l.lr_find(num_it=6, show_plot=False)

others = dict(validates=lambda: within(lambda l: l.validate()), runs_lr_find=lambda: within(run_lr_find),
    fits=lambda: within(lambda l: l.fit(1, 0.1)),
    predicts_inside=lambda: within(lambda l: l.get_preds(dl=l.dls.valid, inner=True)),
    tracks=lambda: [EarlyStoppingCallback(patience=2), SaveModelCallback(), ReduceLROnPlateau(patience=1)],
    penalizes=lambda: [sweep.penalty()], late=lambda: [sweep.penalty('before_backward', GradientAccumulation.order+1)])

@pytest.mark.parametrize('kind', others)
def test_the_run_is_the_same_with_a_callback_that(kind):
    a,b = both_runs(cbs=others[kind], fit=lambda l,cbs: l.fit(8 if kind=='tracks' else 2, 0.6, cbs=cbs))
    assert a.epoch==b.epoch
    assert_same_run(a, b)

@pytest.mark.parametrize('drop_last', [False,True])
def test_an_epoch_that_is_cut_short_leaves_no_gradient(drop_last):
    """The incomplete step is taken unless `drop_last` is set

    `note` writes 'b' for a backward pass and 's' for a step.
    """
    def empty(l): return not any(g is not None and g.any() for g in grads(l))
    learn,note,begin = toy(4, n=64),RecordAt('after_backward', lambda l: 'b', -50),RecordAt('before_train', empty, 100)
    note.before_train,note.after_step = lambda: note.values.append('|'),lambda: note.values.append('s')
    learn.fit(2, 0.05, cbs=[GradientAccumulation(16, drop_last=drop_last),note,begin,ShortEpochCallback(pct=0.3)])
    assert begin.values==[True,True] and empty(learn)
    for epoch in ''.join(note.values)[1:].split('|'):
        *steps,rest = epoch.split('s')
        assert 0<len(steps)<4 and ({*steps}=={'bbbb'} if drop_last else not rest)

# Outside of a fit

def test_validation_and_prediction_work_before_any_fit():
    "The callback may have arguments that a fit would refuse"
    a,b = toy(4),toy(4, cbs=GradientAccumulation(100, drop_last=True))
    assert list(a.validate())==list(b.validate()) and deviation(a.get_preds()[0], b.get_preds()[0])==0
    b.show_training_loop()

def test_a_pickled_callback_gives_the_same_run():
    acc,a,b = GradientAccumulation(16, drop_last=True),toy(16, whole=16),toy(4)
    for _ in range(2):
        a.fit(1, 0.05)
        b.fit(1, 0.05, cbs=pickle.loads(pickle.dumps(acc)))
        toy(4).fit(1, 0.05, cbs=acc)   # the second round pickles a callback that has been in a fit
    assert_same_run(a, b)

def test_an_exported_learner_can_be_loaded_with_its_callback(tmp_path):
    learn = toy(4, path=tmp_path, cbs=GradientAccumulation(16), splitter=params, loss_func=nn.CrossEntropyLoss())
    learn.fit(1, 0.05, cbs=FetchPredsCallback())
    learn.logger,learn.dls.new_empty = print,lambda: DataLoaders(DataLoader([], bs=4), DataLoader([], bs=4))
    learn.export('acc.pkl')
    loaded,x = load_learner(tmp_path/'acc.pkl'),toy_data(70).tensors[0]
    preds = loaded.get_preds(dl=DataLoader([(o,torch.tensor(0)) for o in x], bs=8))[0]
    assert loaded.gradient_accumulation.accum_bs==16 and deviation(preds, learn.model(x))<1e-12
