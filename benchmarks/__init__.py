"""Scripts that measure, such as `python -m benchmarks.ways`. Pages read what the scripts write into `results`."""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')   # before torch is imported: times are those of one thread
import json, platform, statistics
from datetime import date
from importlib.metadata import version
from pathlib import Path

results = Path(__file__).parent/'results'

def made(*notes):
    "When, on what and with which versions something was measured, in a line"
    import fastaccum, torch
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else f'{platform.machine()} CPU'
    versions = f"fastaccum {fastaccum.__version__}, fastai {version('fastai')}, torch {torch.__version__}"
    return ', '.join([f'{date.today()}', *notes, hardware, versions, f'python {platform.python_version()}'])

def save(name, res):
    "Write a result for the pages"
    file = results/f'{name}.json'
    file.write_text(json.dumps(res, indent=1, ensure_ascii=False)+'\n', encoding='utf-8')

def table(head, rows):
    "A Markdown table"
    return '\n'.join('| '+' | '.join(map(str, o))+' |' for o in [head, ['---']*len(head), *rows])

def by_turns(arms, rounds):
    """Call the functions in the dict `arms` by turns, because machines are noisy; returns a list of results for each.

    The first round warms up, and its results are left out. Every other round goes through the arms backwards."""
    found = {nm:[] for nm in arms}
    for i in range(rounds+1):
        for nm in list(arms) if i%2 else reversed(arms):
            res = arms[nm]()
            if i: found[nm].append(res)
    return found

def median_ratio(values, reference): return statistics.median(a/b for a,b in zip(values, reference))

def quiet(learn):
    "The Learner without a progress bar and without printed rows"
    from fastai.callback.progress import ProgressCallback
    from fastcore.basics import noop
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

class Batches(list):
    "Ready-made batches in the place of a loader, so that loading costs nothing"
    def __init__(self, batches, bs, device='cpu'):
        super().__init__(batches)
        self.bs,self.device = bs,device
