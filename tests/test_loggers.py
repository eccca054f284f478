"TensorBoard and Weights & Biases: what they wrote to disk is the twin's, row by row."
import json, struct
import pytest
from pathlib import Path
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.testing import deviation, toy
from test_schedule import MacroLoader

def runs(make_acc, callback, n_epoch=2, n=70, read=None):
    "The rows that `callback` wrote in the run on the plan's macro-batches, and in the accumulated one"
    rows = []
    plan = make_acc().plan(toy(4, n=n).dls, n_epoch)
    for acc in (None,make_acc()):
        learn = toy(4, n=n)
        if acc is None: learn.dls.loaders[0] = MacroLoader(learn.dls.train, plan.sizes)
        rows.append(read(learn, [] if acc is None else [acc], len(rows)))
    return (*rows,plan)

accs = dict(constant=lambda: GradientAccumulation(16), scheduled=lambda: GradientAccumulationSchedule(8, 32, finish=0.5))

# TensorBoard

@pytest.mark.parametrize('kind', accs)
def test_tensorboard(kind, tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    def read(learn, acc, i):
        d = tmp_path/str(i)
        learn.fit_one_cycle(2, 0.05, cbs=acc+[TensorBoardCallback(d, trace_model=False, log_preds=False)])
        events = EventAccumulator(str(d)).Reload()
        return {k:[(o.step,o.value) for o in events.Scalars(k)] for k in events.Tags()['scalars']}
    a,b,plan = runs(accs[kind], TensorBoardCallback, read=read)
    sizes = b.pop('accumulation_batch_size', None)
    assert a.keys()==b.keys() and {'train_loss','lr_0','mom_1','valid_loss'}<=a.keys()
    for k in a: assert deviation(a[k], b[k])<2e-6, k
    assert [s for s,_ in b['train_loss']][:len(plan.sizes[0])]==list(range(1, len(plan.sizes[0])+1))
    if kind=='constant': assert sizes is None
    else: assert len(sizes)==sum(plan.steps) and sizes[0]==(1,8.) and sizes[-1]==(sum(plan.steps),32.)

# Weights & Biases

def history(path):
    "The rows in a W&B offline file: a LevelDB log of blocks of 32 KiB, whose records have a header of 7 bytes"
    from wandb.proto.wandb_internal_pb2 import Record
    data,pos,buf = path.read_bytes(),7,b''
    while pos+7<=len(data):
        if 32768-pos%32768<7:
            pos += 32768-pos%32768
            continue
        _,length,kind = struct.unpack('<IHB', data[pos:pos+7])
        buf += data[pos+7:pos+7+length]
        pos += 7+length
        if kind in (1,4):   # a full record, or the last part of one
            rec,buf = Record.FromString(buf),b''
            if rec.HasField('history'): yield {(o.key or '/'.join(o.nested_key)):json.loads(o.value_json) for o in rec.history.item}

@pytest.mark.parametrize('kind', accs)
def test_wandb(kind, tmp_path):
    wandb = pytest.importorskip('wandb')
    from fastai.callback.wandb import WandbCallback
    def read(learn, acc, i):
        d = tmp_path/str(i)
        d.mkdir()
        vars(learn)['gather_args'] = dict   # fastai #4173: 2.8.10 to 2.8.12 raise while they format these
        run = wandb.init(mode='offline', dir=str(d), settings=wandb.Settings(silent=True, console='off', x_disable_stats=True))
        learn.fit_one_cycle(2, 0.05, cbs=acc+[WandbCallback(log_preds=False)])
        path = Path(run.settings.sync_file)
        run.finish()
        wandb.teardown()   # after `finish` alone the file is not always complete
        return [o for o in history(path) if 'raw_loss' in o]
    a,b,plan = runs(accs[kind], WandbCallback, read=read)
    assert len(a)==len(b)==sum(plan.steps)
    for i,(x,y) in enumerate(zip(a, b)):
        assert y['train_samples_per_sec']>0
        size = y.pop('accumulation_batch_size', None)
        assert (size is None)==(kind=='constant')
        for k in x:
            if not k.startswith('_') and k!='train_samples_per_sec': assert deviation(x[k], y[k])<2e-6, (i,k)
        assert x['_step']==y['_step'] and abs(x['epoch']-y['epoch'])<1e-6
    if kind=='scheduled': assert [o for o in plan.sizes[0]][:2]==[8,8]

def test_wandb_samples_per_second_are_the_macro_batchs(monkeypatch):
    "By a clock that only micro-batches move: a macro-batch's samples over the time since its first micro-batch began"
    import sys, time, types
    from fastaccum.loggers import WandbListener
    from fastai.callback.core import Callback
    logged = []
    monkeypatch.setitem(sys.modules, 'wandb', types.SimpleNamespace(log=lambda row,step: logged.append((row,step))))
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
    from fastaccum.listeners import listeners
    monkeypatch.setitem(listeners, Wandb, WandbListener)
    cb,learn = Wandb(),toy(4, n=64)
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16),cb,Tick()])
    assert [round(e, 9) for _,e in cb.rates]==[0.25,0.5,0.75,1.]
    assert [round(r, 9) for r,_ in cb.rates]==[16/(1+2+3+4)]*4
