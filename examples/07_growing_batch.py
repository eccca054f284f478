"""Let the steps grow from 32 to 256 samples in the first half of training, with the same DataLoaders."""
from fastai.vision.all import *
from fastaccum import GradientAccumulationSchedule  # isort: skip
from sklearn.datasets import load_digits

set_seed(0)
items = [(tensor(x).float()/16, int(y)) for x, y in zip(*load_digits(return_X_y=True))]
dls = DataLoaders(DataLoader(items[:1408], bs=32, shuffle=True), DataLoader(items[1408:], bs=32),
    device=default_device())
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
learn = Learner(dls, model, CrossEntropyLossFlat(), metrics=accuracy)

growing = GradientAccumulationSchedule(32, 256, finish=0.5)
plan = growing.plan(dls, n_epoch=4)   # shows the steps of each epoch before training
print(plan)
learn.fit_one_cycle(4, 0.02, cbs=growing)

sizes = [n for epoch in plan.sizes for n in epoch]
assert len(learn.recorder.losses) == len(sizes)
assert sizes[0] == 32 and max(sizes) == 256
print(f'{len(sizes)} steps, of {sizes[0]} samples at first and of {max(sizes)} in the second half')
