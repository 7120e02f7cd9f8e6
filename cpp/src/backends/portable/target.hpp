// SPDX-License-Identifier: Apache-2.0
//
// The reference: the shared kernels over plain C++, for every machine.
#pragma once

#include "backends/begin.hpp"
