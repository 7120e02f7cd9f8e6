// SPDX-License-Identifier: Apache-2.0
#include "breccia/version.hpp"

#include "breccia/error.hpp"

#define BRECCIA_TEXT_OF(x) #x
#define BRECCIA_TEXT(x) BRECCIA_TEXT_OF(x)

namespace breccia::inline v0_4 {

std::string_view version() {
    return BRECCIA_TEXT(BRECCIA_VERSION_MAJOR) "." BRECCIA_TEXT(BRECCIA_VERSION_MINOR) "." BRECCIA_TEXT(
        BRECCIA_VERSION_PATCH);
}

const char* Error::what() const noexcept { return std::runtime_error::what(); }

}  // namespace breccia::inline v0_4
