"""The module that NVFlare's processes load from the folder that NVFLARE_COMM_DRIVER_PATH names."""

from nvflare.fuel.f3.communicator import driver_mgr

from perfedrl.federation.engine.driver import DRIVERS

driver_mgr.drivers.update(DRIVERS)
