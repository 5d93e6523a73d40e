"""What the first store of torch.distributed opens for the whole process is nothing that a test left behind."""

from __future__ import annotations

import torch._C._distributed_c10d as c10d

c10d.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
