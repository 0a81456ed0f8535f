// Whether threads that wait may look again and again.
#pragma once

namespace popsim::threads {

// False if the user says so to OpenMP: OMP_WAIT_POLICY=PASSIVE.
[[nodiscard]] bool may_spin();

}  // namespace popsim::threads
