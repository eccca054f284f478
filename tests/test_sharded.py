"Models whose parameters are sharded (`fully_shard`) on two and four processes: the run is that of one process"
import pytest, torch
from launch import check, launching, script_of

pytestmark = pytest.mark.skipif(not hasattr(torch.cpu.Stream, 'record_event'),
    reason='PyTorch 2.6 shards on devices only')
script,cases = script_of('sharded.py')
launches = launching(script, {2:[o for o in cases if o!='replicas'], 4:['replicas']})

@pytest.mark.parametrize('case', cases)
def test_sharded(launches, case): check(launches, 4 if case=='replicas' else 2, case)
