"Run them"
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import sys, time
import torch
from .data import set_ups
from . import callbacks, gans, images, series, tables, texts, views
from .run import report, run_all

def main():
    torch.set_num_threads(1)
    run_all(sys.argv[1:])

if __name__=='__main__': main()
