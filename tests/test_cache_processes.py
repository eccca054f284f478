"`GradientCache` on two and three processes: the run without it, and one exchange of gradients per step."
import pytest
from launch import check, launching, script_of

script,cases = script_of('cache_processes.py')
launches = launching(script, {2:cases, 3:cases})

@pytest.mark.parametrize('n', [2,3])
@pytest.mark.parametrize('case', cases)
def test_on_several_processes(launches, n, case): check(launches, n, case)
