"""Train with 256 samples per step on two GPUs together: torchrun --standalone --nproc-per-node 2 06_two_gpus.py"""
from fastai.vision.all import *
from fastai.distributed import *  # pip install accelerate
from fastaccum import GradientAccumulation  # isort: skip
from sklearn.datasets import load_digits

# fastai's DistributedDL calls `.cuda()`, so replace that on a CPU; leave this out on GPUs
if not torch.cuda.is_available():
    os.environ['ACCELERATE_USE_CPU'] = 'true'
    def _broadcast(self, t, rank):
        t = torch.LongTensor(t)
        torch.distributed.broadcast(t, rank)
        return t.tolist()
    DistributedDL._broadcast = _broadcast

set_seed(0)
items = [(tensor(x).float()/16, int(y)) for x, y in zip(*load_digits(return_X_y=True))]
dls = DataLoaders(DataLoader(items[:1408], bs=32, shuffle=True), DataLoader(items[1408:], bs=32))
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)
with learn.distrib_ctx():   # needs `pip install accelerate`
    learn.fit_one_cycle(3, 0.02, cbs=GradientAccumulation(256))

n_steps = len(learn.recorder.losses)
assert n_steps == 3*math.ceil(1408/256)   # a run on one GPU takes as many steps
if not rank_distrib(): print(f'processes: {max(1, num_distrib())}, steps in the fit: {n_steps}')
teardown_distrib()   # without this, a process may crash when it ends
