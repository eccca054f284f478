"Everything fastai users do with a fit, against its twin."
import pickle, sys
import pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelEpochException
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback
from fastai.callback.training import ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import AvgLoss, Learner, Recorder, load_learner
from fastai.metrics import Perplexity, accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, toy, toy_data, twins
from common import Raise, Seen, grads, weights

def fit2(learn, cbs): learn.fit_one_cycle(2, 0.05, cbs=cbs)

# Fits

def test_default_arguments():
    "`GradientAccumulation()` steps per 32 samples, like fastai's"
    b = toy(4, n=70)
    b.fit_one_cycle(2, 0.05, cbs=GradientAccumulation())
    a = toy(32, n=70)
    a.fit_one_cycle(2, 0.05)
    assert_twins(a, b)

def test_several_fits_with_one_callback():
    acc = GradientAccumulation(16)
    a,b = toy(16, n=70, opt_func=Adam),toy(4, n=70, opt_func=Adam)
    for fit in (lambda l,cbs: l.fit_one_cycle(1, 0.01, cbs=cbs),
                lambda l,cbs: l.fit(2, 0.01, cbs=cbs),
                lambda l,cbs: l.fit_flat_cos(1, 0.01, cbs=cbs)):
        fit(a, []); fit(b, [acc])
        assert_twins(a, b)

def test_plain_fit_after_an_accumulated_one():
    "Afterwards the Learner is an ordinary one"
    a,b = twins(n=70)
    fresh = toy(4, n=70)
    fresh.model.load_state_dict(b.model.state_dict())
    for o in (fresh,b): o.fit_one_cycle(1, 0.01, reset_opt=True)
    assert len(b.recorder.losses)==18
    assert_twins(fresh, b)

@pytest.mark.parametrize('opt_func', [SGD,Adam,partial(OptimWrapper, opt=torch.optim.SGD),
    partial(OptimWrapper, opt=torch.optim.AdamW)], ids=str)
def test_freezing(opt_func):
    """Frozen after training, unfrozen again, with weight decay: fastai's optimizers go on decaying a frozen body,
    here as there"""
    def fit(l, cbs):
        for o in (l.unfreeze,l.freeze,l.unfreeze):
            o()
            l.fit_one_cycle(1, slice(1e-3, 1e-2), wd=0.1, cbs=cbs)
    a,b = twins(n=70, opt_func=opt_func, fit=fit)
    assert_twins(a, b)

@pytest.mark.parametrize('kwargs', [dict(), dict(n=64), dict(drop_last=True)], ids=str)
@pytest.mark.parametrize('num_it', [12,30])
def test_lr_find(kwargs, num_it):
    "The finder's points are steps, with the twin's learning rates and losses; a fit after it is the twin's too"
    acc = dict(drop_last=kwargs.pop('drop_last', False))
    def fit(l, cbs):
        for o in cbs: l.add_cb(o)
        sug = l.lr_find(num_it=num_it, show_plot=False, stop_div=False)
        assert len(l.recorder.lrs)==num_it
        hps = l.recorder.hps if hasattr(l.recorder, 'hps') else []
        l.found = sug.valley,list(l.recorder.lrs),torch.stack(list(l.recorder.losses)),hps
        l.fit_one_cycle(1, 0.05)
    a,b = twins(fit=fit, acc=acc, **{'n':70, **kwargs})
    assert deviation(a.found[0], b.found[0])<1e-9 and deviation(a.found[1], b.found[1])<1e-12
    assert deviation(a.found[2], b.found[2])<1e-6
    assert_twins(a, b)

def test_lr_find_stops_like_its_twin():
    def fit(l, cbs):
        for o in cbs: l.add_cb(o)
        l.lr_find(num_it=60, end_lr=1e5, show_plot=False)
        assert len(l.recorder.lrs)<60
    a,b = twins(n=70, fit=fit)
    assert len(a.recorder.lrs)==len(b.recorder.lrs) and deviation(a.recorder.lrs, b.recorder.lrs)<1e-9

def test_lr_find_records_steps_also_without_log_accum_batch():
    b = toy(4, n=70, cbs=GradientAccumulation(16, log_accum_batch=False))
    seen = Seen('after_step', lambda l: l.opt.hypers[-1]['lr'])
    b.add_cb(seen)
    b.lr_find(num_it=12, show_plot=False, stop_div=False)
    assert len(b.recorder.lrs)==len(seen.values)==12 and b.recorder.lrs==seen.values

# What is recorded

@pytest.mark.parametrize('n', [64,70])
def test_train_metrics_see_every_sample(n):
    "`train_metrics=True`, with a metric over predictions and two over the loss"
    def make(bs, **kwargs):
        learn = toy(bs, metrics=[accuracy,AvgLoss(),Perplexity()], **kwargs)
        learn.recorder.train_metrics = True
        return learn
    a,b = twins(make=make, n=n)
    assert len(b.recorder.values[0])==8 and list(a.recorder.metric_names)==list(b.recorder.metric_names)
    assert_twins(a, b)

def test_log_accum_batch_false_records_as_fastai():
    "Every micro-batch is recorded; the optimisation is the same"
    a,b = twins(n=70, acc=dict(log_accum_batch=False))
    assert deviation(weights(a), weights(b))<1e-12
    assert len(b.recorder.losses)==len(b.recorder.lrs)==len(b.recorder.hps['lr'])==b.train_iter==36
    assert list(b.recorder.iters)==[18,36]
    assert deviation([b.recorder.lrs[i] for i in [0,4,8,12,16,18,22,26,30,34]], a.recorder.lrs)<1e-12
    assert b.recorder.lrs[:4]==[b.recorder.lrs[0]]*4

def test_log_accum_batch_false_records_micro_losses():
    "With a learning rate of 0 the recorded losses are a plain run's"
    def run(cbs):
        learn = toy(4, n=70)
        learn.fit(2, 0., wd=0., cbs=cbs)
        return torch.stack(list(learn.recorder.losses))
    assert deviation(run([]), run(GradientAccumulation(16, log_accum_batch=False)))<1e-6

def test_log_accum_batch_false_with_drop_last_records_no_skipped_micro_batch():
    b = toy(4, n=70)
    b.fit(2, 0.05, cbs=GradientAccumulation(16, log_accum_batch=False, drop_last=True))
    assert len(b.recorder.losses)==b.train_iter==2*16

def test_recorded_loss_is_the_macro_batchs():
    losses = Seen('after_batch', lambda l: l.loss.item(), order=49)
    seen = Seen('after_step', lambda l: l.loss.item())
    a = toy(16, n=70); a.fit(1, 0.05, cbs=losses)
    b = toy(4, n=70);  b.fit(1, 0.05, cbs=[GradientAccumulation(16),seen])
    assert deviation(losses.values, seen.values)<1e-6 and len(seen.values)==5

def test_smooth_loss_from_the_first_micro_batch_on():
    seen = Seen('after_batch', lambda l: (hasattr(l, 'smooth_loss'), l.loss.item(), float(l.smooth_loss)), order=51)
    learn = toy(4, n=70)
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16),seen])
    assert all(o[0] for o in seen.values)
    for i in range(3): assert abs(seen.values[i][2]-sum(o[1] for o in seen.values[:i+1])/(i+1))<1e-6   # the mean so far
    # from then on, the last recorded
    for i in range(3, 17): assert seen.values[i][2]==learn.recorder.losses[(i+1)//4-1].item()

# Loaders that end sooner or later than announced, batches left out

def shorten(learn, n_batches, announced):
    "A training loader that yields `n_batches` and announces others"
    dl = learn.dls.train
    class Loader:
        bs,device,dataset,after_batch = dl.bs,dl.device,dl.dataset,None
        def __len__(self): return announced
        def __iter__(self): return iter([b for i,b in enumerate(dl) if i<n_batches])
    learn.dls.loaders[0] = Loader()
    return learn

@pytest.mark.parametrize('announced', [12,10,4])
def test_loader_that_announces_the_wrong_length(announced):
    "10 micro-batches of 4, whatever `len` says: 16, 16, 8 samples if announced too long, and no sample lost"
    a,b = toy(16, n=40),shorten(toy(4, n=40), 10, announced)
    a.fit(2, 0.05); b.fit(2, 0.05, cbs=GradientAccumulation(16))
    assert deviation(weights(a), weights(b))<1e-12
    assert len(b.recorder.losses)==6 and deviation(a.recorder.losses, b.recorder.losses)<1e-6
    assert list(b.recorder.iters)==[3,6]

def test_progress_does_not_leave_its_epoch():
    """A loader that yields more than it announced takes more steps than planned; the learning rate does not run
    ahead into the next epoch"""
    pcts = Seen('before_batch', lambda l: (l.epoch, l.pct_train))
    shorten(toy(4, n=64), 16, 6).fit_one_cycle(2, 0.05, cbs=[GradientAccumulation(8),pcts])
    assert len(pcts.values)==32 and all(e/2<=pct<=(e+1)/2 for e,pct in pcts.values)

def test_a_remainder_whose_step_is_cancelled():
    "Another callback cancels the batch in `before_step`, of all steps the one that is taken after an early end"
    class Cancel(Callback):
        def before_step(self):
            if self.gradient_accumulation.macro.samples==8: raise CancelBatchException
    learn = toy(4, n=64)
    learn.fit(2, 0.05, cbs=[GradientAccumulation(16),Cancel(),ShortEpochCallback(pct=0.3)])
    assert not any(g.any() for g in grads(learn))

def test_a_callback_that_stays_leaves_the_listeners_alone_between_fits():
    learn = toy(4, n=70, cbs=GradientAccumulation(16))
    learn.fit_one_cycle(1, 0.05)
    assert not any('after_batch' in vars(o) for o in learn.cbs)

def test_train_metrics_of_a_settled_remainder():
    "When the loader runs dry, no micro-batch is counted twice in the train metrics"
    def make(n, short):
        learn = toy(16 if not short else 4, n=40, metrics=accuracy)
        learn.recorder.train_metrics = True
        return shorten(learn, 10, 12) if short else learn
    a,b = make(40, False),make(40, True)
    a.fit(1, 0.); b.fit(1, 0., cbs=GradientAccumulation(16))
    assert deviation(a.recorder.values, b.recorder.values)<1e-6

def test_short_epochs():
    "`ShortEpochCallback` ends training in the middle of a macro-batch: what was seen is stepped on"
    seen = Seen('after_step', lambda l: l.gradient_accumulation.macro.samples)
    b = toy(4, n=64)
    b.fit(2, 0.05, cbs=[GradientAccumulation(16),seen,ShortEpochCallback(pct=0.3)])
    assert seen.values==[16,8]*2          # 6 of 16 micro-batches
    assert len(b.recorder.losses)==4

def test_no_gradient_is_left_after_an_early_end():
    empty = Seen('after_train', lambda l: not any(g.any() for g in grads(l)), order=100)
    toy(4, n=64).fit(2, 0.05, cbs=[GradientAccumulation(16),empty,ShortEpochCallback(pct=0.3)])
    assert empty.values==[True,True]

def test_short_epochs_with_drop_last():
    seen = Seen('after_step', lambda l: l.gradient_accumulation.macro.samples)
    b = toy(4, n=64)
    b.fit(2, 0.05, cbs=[GradientAccumulation(16, drop_last=True),seen,ShortEpochCallback(pct=0.3)])
    assert seen.values==[16]*2 and not any(g.any() for g in grads(b))

def test_a_loader_that_changes_between_epochs():
    """A callback halves the batch size after the first epoch, and asks for another epoch: steps and learning rates
    stay the twin's"""
    class Halve(Callback):
        order = 100
        def __init__(self, bs): self.bs = bs
        def before_fit(self): self.learn.n_epoch = 3
        def before_epoch(self):
            if self.epoch==1:
                self.learn.dls.loaders[0] = self.dls.train.new(bs=self.bs, n=70, get_idxs=self.dls.train.get_idxs)
    a,b = toy(16, n=70),toy(4, n=70)
    a.fit_one_cycle(2, 0.05, cbs=Halve(16)); b.fit_one_cycle(2, 0.05, cbs=[Halve(2),GradientAccumulation(16)])
    assert len(b.recorder.losses)==15
    assert_twins(a, b)

@pytest.mark.parametrize('event,exc', [('before_batch',CancelBatchException), ('after_pred',CancelBatchException),
                                       ('after_loss',CancelBatchException),
                                       ('before_backward',CancelBatchException),
                                       ('before_backward',CancelBackwardException)])
@pytest.mark.parametrize('order', [4,8])
@pytest.mark.parametrize('left_out', [(1,),(3,),(0,1,2,3),(15,),(12,13,14,15)], ids=str)
def test_micro_batches_left_out_by_others(event, exc, order, left_out):
    "Another callback cancels some micro-batches: the others make up the macro-batches, with their true mean"
    class Cancel(Callback):
        run_valid = False
        def cancel(self):
            if self.iter in left_out: raise exc
    cancel = Cancel()
    cancel.order = order
    setattr(cancel, event, cancel.cancel)
    sizes = Seen('after_step', lambda l: l.gradient_accumulation.macro.samples)
    b = toy(4, n=64)
    b.fit(1, 0.05, cbs=[GradientAccumulation(16),cancel,sizes])
    keep = [i for i in range(16) if i not in left_out]
    a = toy(4, n=64)
    groups,cur = [],[]
    for i in keep:
        cur.append(i)
        if len(cur)==4 or i==15: groups.append(cur); cur = []
    if cur: groups.append(cur)
    dl = a.dls.train
    dl.create_batches = lambda idxs: (dl.create_batch([dl.dataset[j] for i in g for j in range(4*i, 4*i+4)])
        for g in groups)
    a.fit(1, 0.05)
    assert sizes.values==[4*len(g) for g in groups] and b.train_iter==len(groups)
    assert deviation(weights(a), weights(b))<1e-12
    assert len(b.recorder.losses)==len(groups) and deviation(a.recorder.losses, b.recorder.losses)<1e-6

def test_drop_last_with_an_accum_bs_that_is_no_multiple():
    "10 in micro-batches of 4 makes macro-batches of 12: a remainder of 11 samples is short of that, as in the twin"
    a,b = twins(micro=4, macro=10, n=71, acc=dict(drop_last=True))
    assert len(b.recorder.losses)==2*5
    assert_twins(a, b)

def test_drop_last_skips_the_forward_pass():
    seen = Seen('after_pred', lambda l: l.iter)
    b = toy(4, n=70)
    b.fit(2, 0.05, cbs=[GradientAccumulation(16, drop_last=True),seen])
    assert seen.values==list(range(16))*2

def test_batchnorm_never_sees_what_drop_last_leaves_out():
    model = lambda: nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,3)).double()
    b = toy(4, n=70, model=model, splitter=lambda m: [list(m.parameters())])
    b.fit(1, 0.05, cbs=GradientAccumulation(16, drop_last=True))
    assert b.model[1].num_batches_tracked.item()==16

def test_the_remainder_steps_within_its_batch():
    "The last micro-batch of an epoch is announced as closing and steps in the loop, as the twin's last batch does"
    events = []
    class Note(Callback):
        order,run_valid = 100,False
        def before_batch(self): events.append(self.gradient_accumulation.macro.closing)
        def after_step(self): events.append('step')
        def after_train(self): events.append('after_train')
    toy(4, n=70).fit(1, 0.05, cbs=[GradientAccumulation(16),Note()])
    assert events==[False]*3+[True,'step']+([False]*3+[True,'step'])*3+[False,True,'step','after_train']

@pytest.mark.parametrize('kwargs', [dict(n=70), dict(n=64), dict(n=70, loss_func=CrossEntropy(reduction='sum'))],
    ids=str)
def test_the_plan_is_right_so_nothing_needs_correcting(kwargs):
    "Ragged ends are planned: no pass over all gradients to correct them"
    seen = Seen('before_step', lambda l: (l.gradient_accumulation.macro.planned, l.gradient_accumulation.macro.samples))
    toy(4, **kwargs).fit(1, 1e-3, cbs=[GradientAccumulation(16),seen])
    assert seen.values and all(a==b for a,b in seen.values)

def test_a_cancelled_epoch_leaves_nothing_to_the_next():
    "An epoch cancelled in the middle of a macro-batch: its started macro-batch is dropped, as a batch that never ran"
    a,b = toy(16, n=70),toy(4, n=70)
    a.fit_one_cycle(3, 0.05, cbs=Raise('after_batch', CancelEpochException, 100, at=0))
    b.fit_one_cycle(3, 0.05, cbs=[Raise('after_batch', CancelEpochException, 100, at=5),GradientAccumulation(16)])
    assert deviation(weights(a), weights(b))<1e-12 and deviation(a.recorder.lrs, b.recorder.lrs)<1e-12

# Data and models

class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5,3).double(),nn.Linear(2,3).double()
    def forward(self, x1, x2): return self.a(x1)+self.b(x2)

def structured(bs, target, seed=0, whole=1, torch_dl=False):
    "Two inputs and a target that is a tuple or a dict"
    gen = torch.Generator().manual_seed(0)
    def r(*s): return torch.randn(*s, generator=gen, dtype=torch.float64)
    items = [(r(5),r(2),((r(3),r(3)) if target=='tuple' else dict(y1=r(3), y2=r(3)))) for _ in range(70)]
    def loss(p, y):
        y1,y2 = y.values() if isinstance(y, dict) else y
        return F.mse_loss(p, y1)+F.l1_loss(p, y2)
    torch.manual_seed(seed)
    DL = partial(torch.utils.data.DataLoader, batch_size=bs) if torch_dl else partial(DataLoader, bs=bs)
    dls = DataLoaders(DL(items), DL(items))
    dls.n_inp = 2
    learn = Learner(dls, TwoInputs(), loss, opt_func=SGD, cbs=Float32Loss())
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn

@pytest.mark.parametrize('target', ['tuple','dict'])
@pytest.mark.parametrize('torch_dl', [False,True])
def test_several_inputs_and_structured_targets(target, torch_dl):
    a,b = twins(make=structured, target=target, torch_dl=torch_dl, fit=fit2)
    assert_twins(a, b)

def test_batches_without_targets_train_nothing():
    "fastai does not train on batches without targets, and neither do we"
    ds = torch.utils.data.TensorDataset(torch.randn(70, 5, dtype=torch.float64))
    b = toy(4, data=ds, cbs=GradientAccumulation(16))
    b.remove_cb(b.float32_loss)
    before = weights(b)
    b.fit(1, 0.1)
    assert weights(b).equal(before) and not b.recorder.losses

@pytest.mark.parametrize('how', [lambda l: l.get_preds(dl=l.dls.valid), lambda l: l.validate(),
    lambda l: l.get_preds(dl=l.dls.valid, inner=True)])
def test_a_callback_that_predicts_in_the_middle_of_a_fit(how):
    "`get_preds` and `validate` fire `before_fit` and `after_fit`, but no fit begins or ends"
    class Predict(Callback):
        order,busy = 70,False
        def after_validate(self):
            if self.busy: return   # what we do below comes here again
            self.busy = True
            how(self.learn)
            self.busy = False
    assert_twins(*twins(n=70, cbs=lambda: [Predict()]))

def test_penalties_of_other_callbacks_are_scaled():
    "A penalty that another callback adds to the loss in `after_loss`, as fastai's RNNRegularizer does"
    class Penalty(Callback):
        def after_loss(self):
            if self.training: self.learn.loss_grad = self.loss_grad+0.1*self.pred.pow(2).mean()
    a,b = twins(n=70, cbs=lambda: [Penalty()])
    assert_twins(a, b)

def test_trackers():
    "Early stopping, saving the best, reducing the learning rate: the same decisions"
    cbs = lambda: [EarlyStoppingCallback(patience=2), SaveModelCallback(), ReduceLROnPlateau(patience=1)]
    a,b = twins(n=70, cbs=cbs, fit=lambda l,cbs: l.fit(8, 0.6, cbs=cbs))
    assert a.epoch==b.epoch
    assert_twins(a, b)

def test_export_and_load(tmp_path):
    "A Learner that keeps the callback can be exported, loaded, and predicts"
    b = toy(4, n=70, path=tmp_path, cbs=GradientAccumulation(16), splitter=halves, loss_func=nn.CrossEntropyLoss())
    b.dls.train.get_idxs = b.dls.train.get_idxs.__class__(70, 70, False, 0)
    b.fit(1, 0.05)
    b.logger = print
    b.dls.new_empty = lambda: DataLoaders(DataLoader([], bs=4), DataLoader([], bs=4))
    b.export('acc.pkl')
    loaded = load_learner(tmp_path/'acc.pkl')
    assert loaded.gradient_accumulation.accum_bs==16
    x = toy_data(70).tensors[0]
    preds = loaded.get_preds(dl=DataLoader([(o,torch.tensor(0)) for o in x], bs=8))[0]
    with torch.no_grad(): assert deviation(preds, b.model(x))<1e-12

def halves(m): return [list(m[:2].parameters()), list(m[2:].parameters())]

@pytest.mark.parametrize('used', [False,True])
def test_pickling_the_callback(used):
    acc = GradientAccumulation(16, drop_last=True)
    if used: toy(4, n=70).fit(1, 0.05, cbs=acc)
    acc = pickle.loads(pickle.dumps(acc))
    assert acc.accum_bs==16 and acc.drop_last
    a,b = toy(16, n=64),toy(4, n=64)
    a.fit(1, 0.05); b.fit(1, 0.05, cbs=acc)
    assert_twins(a, b)

@pytest.mark.parametrize('kwargs', [dict(accum_bs=16), dict(accum_bs=100, drop_last=True)], ids=str)
def test_validation_and_prediction_before_any_fit(kwargs):
    "A Learner that keeps the callback validates and predicts like any other, also with what would be refused for a fit"
    a,b = toy(4, n=70),toy(4, n=70, cbs=GradientAccumulation(**kwargs))
    assert list(a.validate())==list(b.validate())
    assert deviation(a.get_preds()[0], b.get_preds()[0])==0
    b.add_cb(ProgressCallback())
    from fastai.callback.core import FetchPredsCallback
    if 'drop_last' not in kwargs: b.fit(1, 0.05, cbs=FetchPredsCallback())

def test_a_loader_without_a_batch():
    "fastai trains on nothing, and so do we"
    for l in (toy(4, n=3, whole=4),toy(4, n=3, whole=4, cbs=GradientAccumulation(16))):
        before = weights(l)
        l.fit(1, 0.05)
        assert weights(l).equal(before) and not l.recorder.losses

def test_targets_that_are_a_list_of_dicts():
    "Object detection: a dict of boxes for each image, as many as there are"
    gen = torch.Generator().manual_seed(0)
    items = [(torch.randn(5, generator=gen, dtype=torch.float64),
        dict(boxes=torch.randn(1+i%3, 4, generator=gen, dtype=torch.float64))) for i in range(70)]
    def collate(b): return torch.stack([x for x,_ in b]),[y for _,y in b]
    def loss(p, y): return sum(F.mse_loss(o.expand_as(t['boxes']), t['boxes']) for o,t in zip(p, y))/len(y)
    def make(bs, seed=0, whole=1):
        torch.manual_seed(seed)
        dl = torch.utils.data.DataLoader(items, bs, collate_fn=collate)
        learn = Learner(DataLoaders(dl, dl), nn.Linear(5,4).double(), loss, opt_func=SGD, cbs=Float32Loss())
        learn.remove_cb(ProgressCallback)
        learn.logger,learn.recorder.valid_metrics = lambda *_: None,False
        return learn
    a,b = twins(make=make, fit=lambda l,cbs: l.fit(2, 0.05, cbs=cbs))
    a.recorder.values = b.recorder.values = []
    assert_twins(a, b)

def test_show_training_loop(capsys):
    toy(4, cbs=GradientAccumulation(16)).show_training_loop()
    lines = capsys.readouterr().out.splitlines()
    for event in ('before_batch','before_backward'):
        assert any(event in l and 'GradientAccumulation' in l for l in lines)

def test_a_callback_that_was_not_told_hears_every_micro_batch():
    seen = Seen('after_batch', lambda l: l.iter)
    toy(4, n=70).fit(1, 0.05, cbs=[GradientAccumulation(16),seen])
    assert seen.values==list(range(18))

def test_a_listener_with_an_event_method_of_its_own_keeps_it():
    "A Recorder whose instance has its own `after_batch`, as `Callback(after_batch=f)` makes it"
    learn,heard = toy(4, n=70),[]
    def after_batch():
        heard.append(learn.training)
        Recorder.after_batch(learn.recorder)
    vars(learn.recorder)['after_batch'] = after_batch
    learn.fit(1, 0.05, cbs=GradientAccumulation(16))
    assert vars(learn.recorder)['after_batch'] is after_batch and heard.count(True)==len(learn.recorder.losses)==5

def test_imports_without_wandb_and_tensorboard():
    "The package imports and trains where the optional packages are missing"
    import subprocess
    code = '''
import sys
for nm in ('wandb','tensorboard','torch.utils.tensorboard'): sys.modules[nm] = None
from fastaccum.all import *
from fastaccum.testing import twins, assert_twins
assert_twins(*twins())
assert not [nm for nm in sys.modules if nm.split('.')[0] in ('wandb','tensorboard','accelerate') and sys.modules[nm]]
'''
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True, timeout=300)

def test_importing_changes_nothing():
    "No default callbacks, no replaced methods; `Learner.bs_find` is the one that is added"
    import subprocess
    code = '''
from fastai.basics import *
from fastai.callback.all import *
def snapshot():
    cs = Learner,Callback,Recorder,TrainEvalCallback,ParamScheduler,MixedPrecision
    return {c.__name__:dict(vars(c)) for c in cs}
before,cbs = snapshot(),list(defaults.callbacks)
import fastaccum.all, fastaccum.testing
after = snapshot()
for nm in ('accum_find','bs_find','recalibrate_bn','twin_check'): assert after['Learner'].pop(nm)
assert after==before and list(defaults.callbacks)==cbs
'''
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True, timeout=300)
