"""What people watch: each listener's rows, values and x positions are those of the run on big batches.

One test per listener, over sizes of data, constant and scheduled macro-batches, with and without loss scaling. Each
test is two fits with `lr_find` in between, the listener and the accumulation on the Learner all the while.
"""
import pytest
from functools import partial
from pathlib import Path
from types import SimpleNamespace as NS
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger, ProgressCallback, ShowGraphCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.metrics import accuracy
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.core.listeners import Listener, listeners
from fastaccum.testing import deviation, toy
from common import Raise, weights
from test_precision import Scaled
from test_schedule import MacroLoader

accs = dict(constant=lambda: GradientAccumulation(64),
    scheduled=lambda: GradientAccumulationSchedule(32, 128, finish=0.5))
precisions = dict(fp32=list, scaled=lambda: [Scaled(init_scale=2.**10, growth_interval=3)])

def grid(f):
    for nm,values in (('precision',precisions), ('n',[256,250]), ('kind',accs)):
        f = pytest.mark.parametrize(nm, values)(f)
    return f

def fits(learn, make_acc, listen, precision, big):
    "Two fits, and `lr_find` in between: with the callback, or on the macro-batches that it plans"
    dls,dl = learn.dls,learn.dls.train
    def run(n_epoch, fit):
        acc = make_acc()
        if big:
            plan = acc.plan(NS(train=dl), n_epoch)
            # `lr_find` is of the first size
            if fit is find: plan = GradientAccumulation(plan.begin(0, 0, 0)[0]).plan(NS(train=dl))
            dls.loaders[0] = MacroLoader(dl, plan.sizes)
        with learn.added_cbs(([] if big else [acc])+precision()+listen()): fit()
    def find(): learn.lr_find(num_it=10, show_plot=False)
    run(2, lambda: learn.fit_one_cycle(2, 0.05))
    run(1, find)
    run(1, lambda: learn.fit(1, 0.01))

def rows_of_both(kind, n, precision, watch, tmp_path):
    """The rows of the big batches' run and of the accumulated one.
    `watch` is given a Learner and a folder, and returns a function that makes callbacks and one that reads rows"""
    rows = []
    for big in (True,False):
        d = tmp_path/str(big)
        d.mkdir()
        learn = toy(16, n=n, metrics=accuracy, path=d)
        listen,read = watch(learn, d)
        fits(learn, accs[kind], listen, precisions[precision], big)
        rows.append(read())
    return rows

def rows_of_micro_batches(watch, tmp_path):
    "The rows with `log_accum_batch=False`, and without accumulation. No weight moves"
    rows = []
    for cbs in ([],[GradientAccumulation(64, log_accum_batch=False)]):
        d = tmp_path/str(len(cbs))
        d.mkdir()
        learn = toy(16, n=250, metrics=accuracy, path=d)
        listen,read = watch(learn, d)
        learn.fit_one_cycle(2, 0., wd=0., moms=(0.9,)*3, cbs=cbs+listen())
        rows.append(read())
    return rows

def plan_steps(kind, n): return [accs[kind]().plan(toy(16, n=n).dls, n_epoch).steps for n_epoch in (2,1)]

def numbers(line): return [float(o) for o in line.split(',')]

# Recorder's pictures

def watch_plots(learn, d):
    import matplotlib.pyplot as plt
    def read():
        lines = {}
        for plot,kwargs in (('plot_loss',dict(skip_start=0)), ('plot_sched',{})):
            plt.close('all')
            getattr(learn.recorder, plot)(**kwargs)
            lines[plot] = [line.get_xydata() for ax in plt.gcf().axes for line in ax.get_lines()]
        plt.close('all')
        return lines
    return list,read

@grid
def test_plots(kind, n, precision, tmp_path):
    a,b = rows_of_both(kind, n, precision, watch_plots, tmp_path)
    assert a.keys()==b.keys()
    for k in a:
        assert len(a[k])>1 and [o.shape for o in a[k]]==[o.shape for o in b[k]]
        assert deviation(a[k], b[k])<2e-6, k

# Progress bar and table

class Table(ProgressCallback):
    "fastai's, noting what it shows"
    name = 'progress'
    def __init__(self): self.table,self.moves = [],[]
    def _write_stats(self, log):
        self.table.append([f'{o:.6f}' if isinstance(o, float) else str(o) for o in log])
        super()._write_stats(log)
    def before_train(self):
        super().before_train()
        update = self.pbar.update
        self.pbar.update = lambda v: self.moves.append([v]) or update(v)
    def after_batch(self):
        super().after_batch()
        if self.training: self.moves[-1].append(self.pbar.comment)

def watch_table(learn, d):
    learn.recorder.add_time,learn.logger = False,print
    made = []
    def listen():
        made.append(Table())
        return made[-1:]
    return listen,lambda: made

@grid
def test_progress(kind, n, precision, tmp_path):
    "The table is the twin's; the bar moves with each micro-batch and shows the smoothed loss of the macro-batches"
    a,b = rows_of_both(kind, n, precision, watch_table, tmp_path)
    for x,y in ((a[0],b[0]), (a[2],b[2])):
        assert x.table[0]==y.table[0]==['epoch','train_loss','valid_loss','accuracy'] and len(x.table)==len(y.table)>1
        assert deviation([numbers(','.join(o)) for o in x.table[1:]], [numbers(','.join(o)) for o in y.table[1:]])<2e-6
        assert [v for v,*_ in y.moves]==[*range(1, 17)]*(len(y.table)-1)
        ends = [[o[1] for o,after in zip(t.moves, t.moves[1:]+[[1]]) if after[0]==1] for t in (x,y)]
        assert ends[0]==ends[1] and all(ends[0])

# Graph

def watch_graph(learn, d):
    "`ShowGraphCallback`: curve, validation points and bounds"
    graphs = []
    class Bar:
        def update_graph(self, gs, x, y):
            graphs.append(([[list(map(float, o)) for o in g] for g in gs], list(map(float, x)), list(map(float, y))))
    class Progress(Callback):
        def before_fit(self): self.mbar = Bar()
    return (lambda: [Progress(),ShowGraphCallback()]),lambda: graphs

@grid
def test_graph(kind, n, precision, tmp_path):
    a,b = rows_of_both(kind, n, precision, watch_graph, tmp_path)
    assert len(a)==len(b)==3 and deviation(a, b)<2e-6
    for (curve,valid),x,_ in b:
        assert valid[0][-1]==curve[0][-1]+1==len(curve[0])   # the last validation point is where the curve ends

# CSV

def watch_csv(learn, d):
    learn.recorder.add_time = False
    return (lambda: [CSVLogger(append=True)]),lambda: (d/'history.csv').read_text().splitlines()

@grid
def test_csv(kind, n, precision, tmp_path):
    a,b = rows_of_both(kind, n, precision, watch_csv, tmp_path)
    assert len(a)==len(b) and b.count('epoch,train_loss,valid_loss,accuracy')==a.count(a[0])>=2
    for x,y in zip(a, b): assert x==y or deviation(numbers(x), numbers(y))<2e-6

# TensorBoard

def watch_tensorboard(learn, d):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    def read():
        events = EventAccumulator(str(d)).Reload()
        return {k:[(o.step,o.value) for o in events.Scalars(k)] for k in events.Tags()['scalars']}
    return (lambda: [TensorBoardCallback(d, trace_model=False, log_preds=False)]),read

@grid
def test_tensorboard(kind, n, precision, tmp_path):
    pytest.importorskip('tensorboard')
    a,b = rows_of_both(kind, n, precision, watch_tensorboard, tmp_path)
    sizes = b.pop('accumulation_batch_size', None)
    assert a.keys()==b.keys() and {'train_loss','lr_0','mom_1','valid_loss','accuracy'}<=a.keys()
    for k in a: assert deviation(a[k], b[k])<2e-6, k
    two,one = plan_steps(kind, n)
    steps = [s for s,_ in b['train_loss']]
    # nothing of `lr_find`, each fit from 1
    assert steps[:two[0]]==list(range(1, two[0]+1)) and steps.count(sum(one))>=2
    if kind=='constant': assert sizes is None
    else:
        assert [s for s,_ in sizes]==[*range(1, sum(two)+1), *range(1, sum(one)+1)]
        assert sizes[0][1]==32. and sizes[-1][1]==128.

# Weights & Biases

@pytest.fixture
def offline(tmp_path, monkeypatch):
    "A function that starts an offline run in a folder, and one that ends it and reads its history and its metrics"
    wandb = pytest.importorskip('wandb')
    from fastai.callback.wandb import WandbCallback
    from fastaccum.wandb import offline_rows
    def start(d):
        monkeypatch.setattr(WandbCallback, '_wandb_watch_called', False)
        return wandb.init(mode='offline', dir=str(d),
            settings=wandb.Settings(silent=True, console='off', x_disable_stats=True))
    def end(run):
        path = Path(run.settings.sync_file)
        run.finish()
        wandb.teardown()   # after `finish` alone the file is not always complete
        return offline_rows(path)
    yield start,end
    if wandb.run is not None: end(wandb.run)

def watch_wandb(offline, stock, **kwargs):
    def watch(learn, d):
        from fastai.callback.wandb import WandbCallback as Stock
        from fastaccum.wandb import WandbCallback
        run = offline[0](d)
        if stock: vars(learn)['gather_args'] = dict   # fastai #4173: 2.8.10 to 2.8.12 raise while they format these
        return (lambda: [(Stock if stock else WandbCallback)(**{'log_preds':False, **kwargs})]),lambda: offline[1](run)
    return watch

def logged(rows): return [o for o in rows if 'raw_loss' in o]

@grid
@pytest.mark.parametrize('stock', [False,True], ids=['ours','stock'])
def test_wandb(kind, n, precision, stock, tmp_path, offline):
    a,b = (logged(o) for o in rows_of_both(kind, n, precision, watch_wandb(offline, stock), tmp_path))
    two,one = plan_steps(kind, n)
    assert len(a)==len(b)==sum(two)+sum(one)
    sizes = [o.pop('accumulation_batch_size', None) for o in b]
    if kind=='constant': assert sizes==[None]*len(b)
    else: assert sizes[0]==sizes[sum(two)]==32 and sizes[sum(two)-1]==sizes[-1]==128
    samples = [o.pop('samples') for o in b]
    assert samples[two[0]-1]==n and samples[sum(two)-1]==2*n and samples[-1]==3*n and samples==sorted(samples)
    for i,(x,y) in enumerate(zip(a, b)):
        assert x.keys()==y.keys() and x['_step']==y['_step'] and abs(x['epoch']-y['epoch'])<1e-6
        assert x.pop('train_samples_per_sec')>0 and y.pop('train_samples_per_sec')>0   # (a test below has a clock)
        for k in x:
            if k not in ('_timestamp','_runtime'): assert deviation(x[k], y[k])<2e-6, (i,k)
    assert b[two[0]-1]['epoch']==1 and b[-1]['epoch']==3 and 'valid_loss' in b[-1]

def test_wandb_without_accumulation_is_stock(tmp_path, offline):
    rows = []
    for stock in (True,False):
        d = tmp_path/str(stock)
        d.mkdir()
        learn = toy(16, n=250, metrics=accuracy, path=d)
        listen,read = watch_wandb(offline, stock)(learn, d)
        learn.fit_one_cycle(2, 0.05, cbs=listen())
        rows.append(read())
    for x,y in zip(*rows):
        assert x.keys()==y.keys()
        for k in x.keys()-{'_timestamp','_runtime','train_samples_per_sec','_wandb'}: assert deviation(x[k], y[k])==0, k
    assert len(rows[0])==len(rows[1])>=32 and 'samples' not in rows[1][-1]

def test_wandb_axis(tmp_path, offline):
    "Losses and metrics are drawn over the samples seen, and the run goes on counting them in the next fit"
    learn = toy(16, n=250, metrics=accuracy)
    listen,_ = watch_wandb(offline, False)(learn, tmp_path)
    import wandb
    run = wandb.run
    for _ in range(2): learn.fit(1, 0.05, cbs=[GradientAccumulation(64)]+listen())
    assert run.summary['samples']==500
    from fastaccum.wandb import offline_records
    axes = {}
    path = Path(run.settings.sync_file)
    offline[1](run)
    for rec in offline_records(path):
        if rec.HasField('metric'): axes[rec.metric.name] = rec.metric.step_metric
    assert axes=={'samples':'', **{k:'samples' for k in ('raw_loss','train_loss','valid_loss','accuracy')}}

def watch_histograms(offline, monkeypatch):
    import wandb
    from wandb.sdk import wandb_watch
    def watch(learn, d):
        res = watch_wandb(offline, False, log='all')(learn, d)
        monkeypatch.setattr(wandb_watch, '_global_watch_idx', 0)
        monkeypatch.setattr(wandb, 'watch', partial(wandb.watch, log_freq=3))   # `wandb.init` sets it
        return res
    return watch

def test_wandb_histograms(tmp_path, offline, monkeypatch):
    "Histograms of gradients and parameters are the macro-batch's, once per step; also scaled and clipped"
    from fastai.callback.training import GradientClip
    precisions['clipped'] = lambda: [Scaled(init_scale=2.**10, growth_interval=3),GradientClip(0.01)]
    try: a,b = rows_of_both('constant', 250, 'clipped', watch_histograms(offline, monkeypatch), tmp_path)
    finally: del precisions['clipped']
    a,b = ([{k:v for k,v in o.items() if k.split('/')[0] in ('gradients','parameters')} for o in rows]
        for rows in (a,b))
    assert [o.keys() for o in a]==[o.keys() for o in b] and sum(map(len, a))>20
    kinds = {k.split('/')[0] for o in a for k in o}
    assert kinds=={'gradients','parameters'}
    for x,y in zip(a, b):
        for k in x:
            if k.endswith('/bins'): assert deviation(x[k], y[k])<2e-6, k
            # a value at the edge of two bins may fall into either
            if k.endswith('/values'): assert sum(x[k])==sum(y[k])>0, k

def test_wandb_hooks_are_put_back(tmp_path, offline):
    import wandb
    learn = toy(16, n=64)
    listen,_ = watch_wandb(offline, False, log='all')(learn, tmp_path)
    learn.fit(1, 0.05, cbs=listen())
    handles = wandb.run._torch._hook_handles
    hooks = lambda: {k:h.hooks_dict_ref()[h.id] for k,h in handles.items()}
    before = hooks()
    assert len(before)==7
    cb = listen()[0]
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 0.05, cbs=[GradientAccumulation(32),cb,Raise('after_epoch', KeyboardInterrupt, 70)])
    assert hooks()==before and not {'after_batch','after_backward'}&vars(cb).keys()

def test_wandb_configuration(tmp_path, offline):
    learn = toy(16, n=64, cbs=GradientAccumulation(32))
    listen,_ = watch_wandb(offline, False)(learn, tmp_path)
    import wandb
    run = wandb.run
    learn.fit(1, 0.05, cbs=listen())
    cfg = dict(run.config)
    assert cfg['GradientAccumulation']['accum_bs']==32 and cfg['WandbCallback']['n_preds']==36
    assert cfg['Learner']['moms']==[0.95,0.85,0.95] and cfg['Learner']['lr']==0.001
    assert cfg['batch size']==16 and cfg['model parameters']==99
    assert 'gather_args' not in vars(learn)

def test_wandb_log_model_without_a_saved_model_is_refused_before_training(tmp_path, offline):
    learn = toy(16, n=64)
    listen,_ = watch_wandb(offline, False, log_model=True)(learn, tmp_path)
    before = weights(learn)
    with pytest.raises(ValueError, match='SaveModelCallback'): learn.fit(1, 0.05, cbs=listen())
    assert weights(learn).equal(before)

def images(d, bs=8):
    "A Learner that tells handwritten digits apart"
    from sklearn.datasets import load_digits
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import IndexSplitter
    from fastai.layers import ConvLayer, Flatten
    from fastai.learner import Learner
    from fastai.vision.core import PILImageBW
    from fastai.vision.data import ImageBlock
    from fastcore.basics import noop
    from torch import nn
    x,y = load_digits(return_X_y=True)
    block = DataBlock((ImageBlock(PILImageBW),CategoryBlock), get_x=lambda i: (x[i].reshape(8, 8)*15).astype('uint8'),
                      get_y=lambda i: y[i],
                      splitter=IndexSplitter(range(64, 72)))
    dls = block.dataloaders(range(72), bs=bs, path=d, num_workers=0)
    learn = Learner(dls, nn.Sequential(ConvLayer(1, 4, stride=2), Flatten(), nn.Linear(64, dls.c)),
        metrics=accuracy, path=d)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def test_tensorboard_graph_and_predictions(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    learn = images(tmp_path)
    learn.fit(2, 0.05, cbs=[GradientAccumulation(32),TensorBoardCallback(tmp_path)])
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Tags()['graph'] and [o.step for o in events.Images('Sample results')]==[2,4]
    assert len(learn.recorder.losses)==4

@pytest.mark.parametrize('every_epoch', [False,True])
def test_wandb_predictions_model_and_dataset(every_epoch, tmp_path, offline, monkeypatch):
    import wandb
    for nm in ('data','out'): (tmp_path/nm).mkdir()
    learn = images(tmp_path/'out')
    (tmp_path/'data'/'digits.txt').write_text('some')
    run,artifacts,tables = offline[0](tmp_path),[],[]
    # W&B refuses the first offline
    for nm in ('use_artifact','log_artifact'): monkeypatch.setattr(type(run), nm, lambda self, o: artifacts.append(o))
    log = wandb.log
    monkeypatch.setattr(wandb, 'log',
        lambda row, **kw: tables.append((row,kw)) if 'Prediction_Samples' in row else log(row, **kw))
    from fastaccum.wandb import WandbCallback
    learn.fit(2, 0.05, cbs=[GradientAccumulation(32),SaveModelCallback(),
        WandbCallback(log_preds_every_epoch=every_epoch, n_preds=4, log_model=True, log_dataset=tmp_path/'data')])
    found = [(len(row['Prediction_Samples'].data), kw['step']) for row,kw in tables]
    assert found==[(4,1),(4,3)][0 if every_epoch else 1:]
    assert [o.type for o in artifacts]==['dataset','model'] and len(learn.recorder.losses)==4

def test_wandb_samples_per_second_are_the_macro_batchs(monkeypatch):
    "By a clock that only micro-batches move: a macro-batch's samples over the time since its first micro-batch began"
    import sys, time, types
    from fastaccum.loggers import WandbListener
    from fastai.callback.core import Callback
    logged = []
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(log=lambda row,step: logged.append((row,step)),
        define_metric=lambda *_,**__: None, run=types.SimpleNamespace(summary={}, _torch_history=None)))
    now = [0.]
    class Wandb(Callback):
        "What fastai's callback does with time and epochs"
        order,run_valid = 51,False
        def before_fit(self): self._wandb_step,self._wandb_epoch,self.rates = -1,0,[]
        def before_batch(self): self.ti_batch = time.perf_counter()
        def after_batch(self):
            self._wandb_step += 1
            self._wandb_epoch += 1/self.n_iter
            self.rates.append((len(self.xb[0])/(time.perf_counter()-self.ti_batch), self._wandb_epoch))
    class Tick(Callback):
        "Micro-batches take 1, 2, 3, 4 seconds, 1, 2, …"
        order,run_valid = 40,False
        def after_batch(self): now[0] += 1+self.iter%4
    monkeypatch.setattr(time, 'perf_counter', lambda: now[0])
    from fastaccum.core.listeners import listeners
    monkeypatch.setitem(listeners, Wandb, WandbListener)
    cb,learn = Wandb(),toy(4, n=64)
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16),cb,Tick()])
    assert [round(e, 9) for _,e in cb.rates]==[0.25,0.5,0.75,1.]
    assert [round(r, 9) for r,_ in cb.rates]==[16/(1+2+3+4)]*4
    assert logged==[({'samples':16*(i+1)}, i) for i in range(4)]

# A user's own

def test_own_listener():
    "An entry in `listeners` is enough to hear once per step; without one, a callback hears every micro-batch"
    class Mine(Callback):
        run_valid = False
        def before_fit(self): self.rows = []
        def after_batch(self): self.rows.append((self.train_iter, self.loss.item(), self.pct_train))
    class Told(Mine): pass
    class Other(Mine): pass
    listeners[Told] = Listener
    try:
        told,other,big = Told(),Other(),Told()
        toy(4, n=70).fit_one_cycle(2, 0.05, cbs=[GradientAccumulation(16),told,other])
        toy(16, n=70).fit_one_cycle(2, 0.05, cbs=big)
    finally: del listeners[Told]
    assert deviation(told.rows, big.rows)<2e-6 and len(told.rows)==10 and len(other.rows)==36

# Logging micro-batches

@pytest.mark.parametrize('watch', [watch_plots,watch_table,watch_graph,watch_csv,watch_tensorboard],
    ids=lambda f: f.__name__)
def test_log_accum_batch_false(watch, tmp_path):
    if watch is watch_tensorboard: pytest.importorskip('tensorboard')
    a,b = rows_of_micro_batches(watch, tmp_path)
    if watch is watch_table:
        a,b = (([numbers(','.join(r)) for r in o[0].table[1:]],[[float(c) for c in m] for m in o[0].moves])
            for o in (a,b))
    if watch is watch_csv: a,b = ([numbers(r) for r in o[1:]] for o in (a,b))
    assert a and deviation(a, b)<2e-6
    if isinstance(a, dict): assert a.keys()==b.keys()

def test_wandb_log_accum_batch_false(tmp_path, offline, monkeypatch):
    "Also histograms come when they would come without us; those of gradients show weighted ones"
    a,b = rows_of_micro_batches(watch_histograms(offline, monkeypatch), tmp_path)
    assert [o.keys() for o in a]==[o.keys() for o in b] and len(logged(a))==32
    def shown(o):
        times = '_timestamp','_runtime','train_samples_per_sec'
        return {k:v for k,v in o.items() if k not in times and not k.startswith('gradients')}
    for x,y in zip(a, b): assert deviation(shown(x), shown(y))<2e-6
